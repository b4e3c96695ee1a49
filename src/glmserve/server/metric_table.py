# SPDX-License-Identifier: Apache-2.0
"""Every metric that glm_dsa adds to the inference server's metrics port. Names follow vLLM's.

A `histogram` is the server's own kind and takes one value a call, each a round trip to the server
process: right for what a request has once. Intervals between tokens come by the thousand, so their
three series (`_bucket` with `le`, `_sum`, `_count`) are counters that are brought up to date
together; `histogram_quantile` reads them all the same. Not its job: values (`metrics.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "glm_dsa:"

_SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
_SHORT_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1.0, 2.5),
)
_TOKENS = tuple(float(1 << power) for power in range(21))


@dataclass(frozen=True)
class Metric:
    """One family; `label` is its own label beside `model` and `version`."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "intervals"]
    doc: str
    label: str = ""
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets


METRICS: Final = (
    Metric("prompt_tokens_total", "counter", "Prompt tokens of accepted requests."),
    Metric("generation_tokens_total", "counter", "Tokens made."),
    Metric("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache."),
    Metric(
        "requests_finished_total",
        "counter",
        "Requests that ended: stop, length, abort, error, refused; each of `n` choices counts.",
        label="finished_reason",
    ),
    Metric("num_preemptions_total", "counter", "Running requests that lost their pages."),
    Metric("spec_decode_num_draft_tokens_total", "counter", "Draft tokens made."),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft tokens accepted, by their place in the step.",
        label="position",
    ),
    Metric("engine_steps_total", "counter", "Steps that the ranks ran."),
    Metric("engine_rows_total", "counter", "Token rows that went through the model."),
    Metric(
        "expert_tokens_total",
        "counter",
        "Rows that a rank's routed experts took, once for each expert; renewed every second.",
        label="rank",
    ),
    Metric(
        "expert_imbalance",
        "gauge",
        "Rows of the busiest expert over the mean, averaged over layers, in the last second.",
    ),
    Metric(
        "expert_rank_imbalance",
        "gauge",
        "Rows of the rank with the busiest experts over the mean, likewise.",
    ),
    Metric("num_requests_running", "gauge", "Requests that have a row."),
    Metric("num_requests_waiting", "gauge", "Requests that wait for one."),
    Metric("kv_cache_pages", "gauge", "Pages of the caches."),
    Metric("kv_cache_pages_used", "gauge", "Pages that running requests hold."),
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "From a request's arrival to its first token from the engine.",
        bounds=_SECONDS,
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "From a request's arrival to its last response.",
        bounds=_SECONDS,
    ),
    Metric(
        "request_queue_time_seconds",
        "histogram",
        "From a request's arrival in the engine to its admission.",
        bounds=_SECONDS,
    ),
    Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request.", bounds=_TOKENS),
    Metric(
        "request_generation_tokens", "histogram", "Tokens of a request's answer.", bounds=_TOKENS
    ),
    Metric(
        "inter_token_latency_seconds",
        "intervals",
        "Time of each token after the first; a step's tokens share its time.",
        bounds=_SHORT_SECONDS,
    ),
    Metric(
        "inter_step_latency_seconds",
        "intervals",
        "Time between a request's steps that brought tokens.",
        bounds=_SHORT_SECONDS,
    ),
)
