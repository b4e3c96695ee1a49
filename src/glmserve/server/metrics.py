# SPDX-License-Identifier: Apache-2.0
"""Publishes glm_dsa's metrics through the inference server, from a thread of its own.

Every call to a metric is a round trip to the server process (71 us on two cores), so nothing here
is called where tokens pass: twice a second the thread takes what has been counted since. All three
kinds work on the 2.51 server of the wheel; later ones are untried. The server's objects must be
gone before the stub ends: `close` drops them. Not its job: counting.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from glmserve.messages import EngineStats
from glmserve.server.metric_table import METRICS, PREFIX, Metric
from glmserve.server.observations import Intervals, Observations

_PERIOD: Final = 0.5  # seconds, as often as the engine reports

# (kind, name, doc) -> the server's MetricFamily; kind is COUNTER, GAUGE or HISTOGRAM.
MakeFamily = Callable[[str, str, str], Any]


class Metrics:
    """Families and series of one model; `close` before the process ends."""

    def __init__(
        self,
        make_family: MakeFamily,
        labels: Mapping[str, str],
        observations: Observations,
        stats: Callable[[], EngineStats | None],
    ) -> None:
        """`labels` are on every series; `stats` gives the engine's newest report."""
        self._observations = observations
        self._stats = stats
        self._labels = dict(labels)
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, str], Any] = {}  # by name and value of the own label
        self._published: dict[tuple[str, str], float] = {}  # of counters
        self._metrics = {metric.name: metric for metric in METRICS}
        for metric in METRICS:
            for name in _family_names(metric):
                kind = "COUNTER" if metric.kind == "intervals" else metric.kind.upper()
                self._families[name] = make_family(kind, PREFIX + name, metric.doc)
            if not metric.label and metric.kind != "intervals":
                self._one(metric.name)
        self._publish()  # a scraper sees every series from the start
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, then drops the series before their families."""
        self._closing.set()
        self._thread.join(timeout=2.0)
        self._series.clear()
        self._families.clear()

    def _run(self) -> None:
        while not self._closing.wait(_PERIOD):
            try:
                self._publish()
            except Exception as error:  # metrics must never harm requests
                print(f"glm_dsa: metrics: {error!r}", flush=True)

    def _publish(self) -> None:
        seen = self._observations
        for reason in ("stop", "length", "abort", "error", "refused"):
            self._count("requests_finished_total", seen.finished[reason], reason)
        for name, intervals in (
            ("inter_token_latency_seconds", seen.per_token),
            ("inter_step_latency_seconds", seen.per_step),
        ):
            self._count_intervals(name, intervals)
        with contextlib.suppress(queue.Empty):
            for _ in range(seen.values.qsize()):
                name, value = seen.values.get_nowait()
                self._one(name).observe(value)
        stats = self._stats()
        if stats is not None:
            for name, count, label in _counters(stats):
                self._count(name, count, label)
            for name, value in _gauges(stats):
                self._one(name).set(value)

    def _count_intervals(self, name: str, intervals: Intervals) -> None:
        below = 0
        bounds = [f"{bound:g}" for bound in intervals.bounds]
        for bound, count in zip([*bounds, "+Inf"], intervals.counts, strict=True):
            below += count
            self._count(name + "_bucket", below, bound, label="le")
        self._count(name + "_count", below)
        self._count(name + "_sum", intervals.total)

    def _count(self, name: str, value: float, own: str = "", label: str = "") -> None:
        """Brings a counter up to `value`."""
        series = self._one(name, own, label)
        growth = value - self._published.get((name, own), 0.0)
        if growth > 0:
            series.increment(growth)
            self._published[name, own] = value

    def _one(self, name: str, own: str = "", label: str = "") -> Any:
        """The series of a family with the value `own` of its own label."""
        series = self._series.get((name, own))
        if series is None:
            metric = self._metrics.get(name)
            labels = {**self._labels}
            if own:
                labels[label or (metric.label if metric else "")] = own
            buckets = {"buckets": list(metric.bounds)} if metric and metric.bounds else {}
            series = self._families[name].Metric(labels=labels, **buckets)
            self._series[name, own] = series
        return series


def _family_names(metric: Metric) -> tuple[str, ...]:
    if metric.kind == "intervals":
        return tuple(metric.name + part for part in ("_bucket", "_sum", "_count"))
    return (metric.name,)


def _counters(stats: EngineStats) -> Iterator[tuple[str, int, str]]:
    yield "prompt_tokens_total", stats.prompt_tokens, ""
    yield "generation_tokens_total", stats.generated_tokens, ""
    yield "prefix_cache_hits_total", stats.cached_tokens, ""
    yield "num_preemptions_total", stats.preemptions, ""
    yield "spec_decode_num_draft_tokens_total", stats.drafted_tokens, ""
    for position, accepted in enumerate(stats.accepted_by_position):
        yield "spec_decode_num_accepted_tokens_per_pos_total", accepted, str(position)
    yield "engine_steps_total", stats.steps, ""
    yield "engine_rows_total", stats.rows, ""
    for rank, tokens in enumerate(stats.expert_tokens_by_rank):
        yield "expert_tokens_total", tokens, str(rank)


def _gauges(stats: EngineStats) -> Iterator[tuple[str, float]]:
    yield "expert_imbalance", stats.expert_imbalance
    yield "expert_rank_imbalance", stats.rank_imbalance
    yield "num_requests_running", stats.running
    yield "num_requests_waiting", stats.waiting
    yield "kv_cache_pages", stats.pages
    yield "kv_cache_pages_used", stats.pages - stats.free_pages
