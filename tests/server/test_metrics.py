# SPDX-License-Identifier: Apache-2.0
"""What the metrics port says under load equals what was sent and received."""

from __future__ import annotations

import re
from typing import Any

from glmserve.server.metric_table import METRICS
from tests.server.harness import Answer, BackgroundStreams, Server, wait_until

GREEDY = {"stream": True, "temperature": 0.0, "ignore_eos": True}
LENGTHS = (5, 12, 20, 20, 30, 30)
HISTOGRAMS = ("time_to_first_token_seconds", "e2e_request_latency_seconds")
HISTOGRAMS += ("request_queue_time_seconds", "request_prompt_tokens", "request_generation_tokens")
HISTOGRAMS += ("inter_token_latency_seconds", "inter_step_latency_seconds")


def _finished(metrics: dict[str, float]) -> dict[str, float]:
    name = r'requests_finished_total\{finished_reason="(\w+)"\}'
    return {m[1]: value for key, value in metrics.items() if (m := re.fullmatch(name, key))}


class _Growth:
    """How much the counters have grown since it was made, once every request is accounted for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.before = server.settled_metrics()

    def after(self, requests: int) -> dict[str, float]:
        before = sum(_finished(self.before).values())

        def settled() -> bool:
            now = self._server.metrics()
            return sum(_finished(now).values()) - before == requests and (
                now["num_requests_running"] == now["kv_cache_pages_used"] == 0
            )

        wait_until(settled, 60.0, f"{requests} requests are in the metrics")
        now = self._server.settled_metrics()
        return {name: value - self.before.get(name, 0.0) for name, value in now.items()}


def _counts(answers: list[Answer]) -> tuple[int, int]:
    inputs = sum(a.responses[0]["num_input_tokens"] for a in answers)
    return inputs, sum(r["num_output_tokens"] for a in answers for r in a.responses)


def test_counters_equal_what_was_sent(drafting: Server) -> None:
    growth = _Growth(drafting)
    requests: list[dict[str, Any]] = [
        {"text_input": f"{'word ' * (30 * i)}number {i}", "max_tokens": length, **GREEDY}
        for i, length in enumerate(LENGTHS)
    ]
    inputs, outputs = _counts(BackgroundStreams(drafting, requests).join(60.0))
    grown = growth.after(len(LENGTHS))
    assert outputs == sum(LENGTHS)
    assert (grown["prompt_tokens_total"], grown["generation_tokens_total"]) == (inputs, outputs)
    assert grown['requests_finished_total{finished_reason="length"}'] == len(LENGTHS)
    assert grown["request_prompt_tokens_sum"] == inputs
    assert grown["request_generation_tokens_sum"] == outputs
    for name in HISTOGRAMS[:5]:
        assert grown[f"{name}_count"] == grown[f'{name}_bucket{{le="+Inf"}}'] == len(LENGTHS)
    assert grown["inter_token_latency_seconds_count"] == outputs - len(LENGTHS)
    steps = grown["inter_step_latency_seconds_count"]
    accepted = [v for k, v in grown.items() if "accepted_tokens_per_pos" in k]
    # A step of a request brings one token of its own and the drafts that it accepted.
    assert steps == outputs - len(LENGTHS) - sum(accepted)
    assert grown["spec_decode_num_draft_tokens_total"] == 2 * steps
    elapsed = grown["inter_token_latency_seconds_sum"]
    assert 0 < elapsed < grown["e2e_request_latency_seconds_sum"]
    assert abs(elapsed - grown["inter_step_latency_seconds_sum"]) < 1e-6
    rows = inputs - grown["prefix_cache_hits_total"] + 3 * steps
    assert grown["engine_rows_total"] == rows
    assert grown["engine_steps_total"] >= max(LENGTHS) / 3
    assert growth.before["kv_cache_pages"] > 0


def test_reasons_are_those_that_clients_saw(drafting: Server) -> None:
    growth = _Growth(drafting)
    probe = {"text_input": "Once upon a time", "max_tokens": 40, **GREEDY}
    text = drafting.grpc_stream(**probe).text
    stopped = drafting.grpc_stream(**probe, stop_words=[text[20:24]])
    assert stopped.finish_reason == "stop"
    assert drafting.generate(**probe | {"stream": False, "max_tokens": 1 << 30})[0] == 400
    with drafting.open_stream(**probe | {"max_tokens": 3000}) as stream:
        stream.read()
        stream.cancel()
    grown = growth.after(4)
    reasons = {reason: count for reason, count in _finished(grown).items() if count}
    assert reasons == {"length": 1, "stop": 1, "refused": 1, "abort": 1}
    assert grown["request_prompt_tokens_count"] == 3  # the refused one was not accepted


def test_a_repeated_prompt_hits_the_prefix_cache(drafting: Server) -> None:
    request = {"text_input": "tell me again " * 60, "max_tokens": 4, **GREEDY}
    drafting.grpc_stream(**request)
    growth = _Growth(drafting)
    again = drafting.grpc_stream(**request).responses[0]
    cached = (again["num_input_tokens"] - 1) // 64 * 64
    assert growth.after(1)["prefix_cache_hits_total"] == again["num_cached_tokens"] == cached > 0


def test_every_family_of_the_table_is_scraped_with_its_text(drafting: Server) -> None:
    def reported() -> bool:  # a step a second says what its experts took
        drafting.grpc_stream(text_input="x", max_tokens=30, **GREEDY)
        return 'expert_tokens_total{rank="0"}' in drafting.metrics()

    wait_until(reported, 60.0, "the experts' load is in the metrics")
    now = drafting.settled_metrics()
    _, text = drafting._http("GET", "/metrics", port=drafting.metrics_port)
    for metric in METRICS:
        kind = "counter" if metric.kind == "intervals" else metric.kind
        name = metric.name + ("_bucket" if metric.kind == "intervals" else "")
        assert f"# HELP glm_dsa:{name} {metric.doc}\n" in text
        assert f"# TYPE glm_dsa:{name} {kind}\n" in text
        assert re.search(rf"^glm_dsa:{metric.name}\w*\{{", text, re.MULTILINE), metric.name
    assert now['expert_tokens_total{rank="0"}'] > 0
    assert now["expert_imbalance"] >= 1.0
    buckets = {
        float(bound[1]): value
        for key, value in now.items()
        if (bound := re.fullmatch(r'inter_token_latency_seconds_bucket{le="(.+)"}', key))
    }
    assert len(buckets) == 16
    assert [buckets[bound] for bound in sorted(buckets)] == sorted(buckets.values())
