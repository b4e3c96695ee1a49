# SPDX-License-Identifier: Apache-2.0
"""The rooms of src/glmserve and who may know whom. The table here is the rule; code follows it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "glmserve"
MODEL_REPOSITORY = ROOT / "model_repository"

# Top to bottom: a room may import rooms on lower lines only, never its neighbours on its own line.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"cli"}),
    frozenset({"server", "openai"}),
    frozenset({"runtime"}),
    frozenset({"engine", "model"}),
    frozenset({"checkpoint", "parallel", "text"}),
    frozenset({"kernels"}),
    frozenset({"ipc"}),
    frozenset({"messages"}),
)
# Single modules at the bottom. They may know each other, never a room.
LEAVES = frozenset(
    {
        *("cache_format", "config", "env", "errors"),
        *("generation_config", "model_config", "sampling_params"),
    }
)

# Edges that the order above forbids and that are right all the same: (module, room) -> reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("glmserve.checkpoint.synthetic", "text"): "a checkpoint includes its tokenizer files",
}

# The server's process must never load the compute side, although that lies below it.
FORBIDDEN = {"server": {"runtime", "model", "kernels", "checkpoint"}, "kernels": {*LEAVES}}

# These never import torch or transformers, lazily or not: they live in processes without a GPU.
TORCH_FREE = {"text", "engine", "messages", "ipc", "server", "openai", *LEAVES}
TORCH_FREE_MODULES = {"glmserve", "glmserve.parallel", "glmserve.parallel.launcher"}
HEAVY = {"torch", "transformers", "triton", "xgrammar"}


def module_name(path: Path) -> str:
    parts = ("glmserve", *path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


def imports_of(path: Path, package: str) -> Iterator[tuple[str, int]]:
    """Yields (absolute dotted name, line) of each import anywhere in the file, lazy ones too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            prefix = ".".join(base) if node.level else ""
            stem = ".".join(part for part in (prefix, node.module or "") if part)
            # `from glmserve import env` names a module, `from glmserve.env import X` does not.
            names = [f"{stem}.{alias.name}" for alias in node.names]
            yield from ((name, node.lineno) for name in (names if stem == "glmserve" else [stem]))


def imports(module: str) -> Iterator[tuple[str, int]]:
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return imports_of(path, package)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def depth(room: str) -> int:
    return next((i for i, layer in enumerate(LAYERS) if room in layer), len(LAYERS))


def test_every_room_is_in_the_table() -> None:
    known = {"", *LEAVES}.union(*LAYERS)
    assert {room_of(module) for module in SOURCES} <= known


def test_imports_run_downward_only() -> None:
    wrong = []
    for module in SOURCES:
        room = room_of(module)
        for name, line in imports(module):
            target = room_of(name)
            if name.split(".")[0] != "glmserve" or target in ("", "__version__", room):
                continue
            downward = depth(room) < depth(target) or (room in LEAVES and target in LEAVES)
            allowed = downward and target not in FORBIDDEN.get(room, set())
            if not allowed and (module, target) not in EXCEPTIONS:
                wrong.append(f"{module}:{line} imports {name}")
    assert wrong == []


def test_every_exception_is_still_needed() -> None:
    used = {(m, room_of(name)) for m in SOURCES for name, _ in imports(m)}
    assert set(EXCEPTIONS) <= used


def _importers(package: str) -> set[str]:
    return {
        module for module in SOURCES for name, _ in imports(module) if name.split(".")[0] == package
    }


def test_rooms_without_torch_import_nothing_heavy() -> None:
    wrong = {
        (module, package)
        for package in HEAVY
        for module in _importers(package)
        if room_of(module) in TORCH_FREE or module in TORCH_FREE_MODULES
    }
    assert wrong == set()


def test_transformers_is_never_imported() -> None:
    assert _importers("transformers") == set()


def test_only_kernels_import_the_triton_language() -> None:
    assert {room_of(module) for module in _importers("triton")} <= {"kernels"}


def test_only_the_server_room_imports_the_backend_utilities() -> None:
    assert {room_of(module) for module in _importers("triton_python_backend_utils")} <= {"server"}


def test_model_files_import_only_rooms_without_torch() -> None:
    names = {
        name
        for path in MODEL_REPOSITORY.glob("*/1/model.py")
        for name, _ in imports_of(path, "")
        if name.split(".")[0] == "glmserve"
    }
    assert names
    assert {room_of(name) for name in names} <= TORCH_FREE


def test_nothing_is_called_triton_utils() -> None:
    forbidden = re.compile("triton" + "_utils")
    found = [
        path
        for folder in (SRC, MODEL_REPOSITORY)
        for path in folder.rglob("*.py")
        if forbidden.search(path.name) or forbidden.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


PROBE = """
import importlib, sys, types
# Exists only inside the server's stub processes.
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
for module in sys.argv[1:]:
    importlib.import_module(module)
    heavy = sorted({"torch", "transformers", "triton"} & set(sys.modules))
    if heavy:
        sys.exit(f"importing {module} loads {', '.join(heavy)}")
"""


@pytest.mark.parametrize("room", sorted({"text", "engine", "ipc", "server", "leaves"}))
def test_importing_the_room_loads_neither_torch_nor_transformers(room: str) -> None:
    wanted = {*LEAVES, "messages", ""} if room == "leaves" else {room}
    modules = [m for m in SOURCES if room_of(m) in wanted and not m.endswith("__main__")]
    assert modules
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *modules], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
