# SPDX-License-Identifier: Apache-2.0
"""Writes the README's reference tables from the code that they describe.

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`. `render` is what the test
compares; running this file rewrites README.md. Not its job: any other text of the README.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from glmserve import env
from glmserve.server.metric_table import METRICS, PREFIX
from glmserve.server.tensors import MODELS, Tensor

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
KERNELS = ROOT / "bench" / "results" / "kernels.json"
STEPS = ROOT / "bench" / "results" / "step.json"
RANK = ROOT / "bench" / "results" / "rank.json"
_BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def _tensors(tensors: Iterable[Tensor]) -> str:
    return _table(
        ("name", "type", "shape", "meaning"),
        ((f"`{t.name}`", t.dtype, str(list(t.dims)), t.doc) for t in tensors),
    )


def _settings() -> str:
    rows = []
    for variable in env.REGISTRY.values():
        default = str(variable.default)
        rows.append((f"`{variable.name}`", f"`{default}`" if default else "", variable.doc))
    return _table(("variable", "default", "meaning"), rows)


def _metrics() -> str:
    rows = []
    for metric in METRICS:
        kind = {"intervals": "histogram (counters)"}.get(metric.kind, metric.kind)
        label = f"`{metric.label}`" if metric.label else ""
        rows.append((f"`{PREFIX}{metric.name}`", kind, label, metric.doc))
    return _table(("metric", "kind", "label", "meaning"), rows)


# The decode sizes of one rank, and prefill, of what a step spends most of its time on.
_SHOWN = ("sparse_mla", "index_logits", "topk_select", "experts", "linear", "boundary")


def _kernels() -> str:
    recorded = json.loads(KERNELS.read_text(encoding="utf-8"))
    rows = [
        (row["op"], row["shape"], *(_figure(row[key]) for key in ("us", "floor_us", "peer_us")))
        for row in recorded["rows"]
        if row["op"] in _SHOWN and row["peer_us"] is not None
    ]
    versions = ", ".join(f"{name} {version}" for name, version in recorded["versions"].items())
    head = f"{recorded['card']}, {versions}, {recorded['date']}:\n\n"
    return head + _table(("operator", "shape", "us", "floor", "peer"), rows)


def _steps() -> str:
    recorded = json.loads(STEPS.read_text(encoding="utf-8"))
    keys = ("replay_ms", "captured_ms", "engine_ms", "eager_ms")
    rows = [
        (str(row["rows"]), str(row["drafts"]), *(f"{row[key]:.2f}" for key in keys))
        for row in recorded["rows"]
    ]
    head = f"{recorded['device']}, torch {recorded['torch']}, {recorded['date']}, ms a step:\n\n"
    columns = ("sequences", "drafts", "replay", "rank", "engine", "eager")
    return head + _table(columns, rows)


# What a rank's step spends most of its time on; the remainder is one column.
_SPLIT = ("experts", "linear", "sparse_mla", "boundary", "topk_select")


def _rank() -> str:
    recorded = json.loads(RANK.read_text(encoding="utf-8"))
    rows = []
    for row in recorded["rows"]:
        split = dict(row["split"])
        shown = [split.pop(name, 0.0) for name in _SPLIT]
        size = (row["part"], str(row["rows"]), f"{row['context']:,}", str(row["drafts"]))
        shared = " (shared pages)" if row.get("pages_shared") else ""
        figures = (row["ms"], row["floor_ms"], *shown, sum(split.values()))
        rows.append((size[0] + shared, *size[1:], *(f"{figure:.2f}" for figure in figures)))
    versions = ", ".join(f"{name} {version}" for name, version in recorded["versions"].items())
    head = f"{recorded['card']}, {versions}, {recorded['date']}, ms:\n\n"
    return head + _table(
        ("part", "rows", "context", "drafts", "all", "floor", *_SPLIT, "others and gaps"), rows
    )


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


TABLES: dict[str, Callable[[], str]] = {
    "ensemble-inputs": lambda: _tensors(MODELS["ensemble"].inputs),
    "ensemble-outputs": lambda: _tensors(MODELS["ensemble"].outputs),
    "kernels": _kernels,
    "metrics": _metrics,
    "rank": _rank,
    "settings": _settings,
    "steps": _steps,
}


def render(text: str) -> str:
    """Returns the README text with every table replaced; a missing or unknown one is an error."""
    found = [match.group(2) for match in _BLOCK.finditer(text)]
    if sorted(found) != sorted(TABLES):
        raise ValueError(f"README.md has tables {found}, expected {list(TABLES)}, each once")
    return _BLOCK.sub(lambda m: m.group(1) + TABLES[m.group(2)]() + m.group(3), text)


if __name__ == "__main__":
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
