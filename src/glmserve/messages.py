# SPDX-License-Identifier: Apache-2.0
"""Dataclasses that cross a process border, and their wire form.

client -> engine   Request, Cancel     engine -> client   Progress, EngineInfo, Update, EngineStats,
                                                         EngineFailed
engine -> ranks    StepPlan, StepMasks  rank 0 -> engine   Progress, RanksReady, StepResult

Both ends are this project's own processes on one machine, so the wire form is pickle. What every
step says about every row is in columns (numpy arrays), which travel as bytes: pickling an array
costs 5 us. What a sampling setting means, and which values are refused, is in `sampling_params`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from glmserve.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]


def _no_rows() -> IntArray:
    return np.empty(0, dtype=np.int32)


def _int32(data: bytes) -> IntArray:
    return np.frombuffer(data, dtype=np.int32)


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class DraftScript:
    """Drafts that a test puts in place of the MTP layer's, to force accepted lengths."""

    output: IntArray  # the request's whole output, known from an earlier run
    wrong_at: int | None = None  # draft of each step that is made wrong; None = all are right


@dataclass(frozen=True)
class Request:
    """One prompt to complete. `uid` is unique among the requests of a server's life."""

    uid: str
    prompt: IntArray  # [tokens] int32
    sampling: SamplingParams
    draft_script: DraftScript | None = None


@dataclass(frozen=True)
class Cancel:
    """Ends a request with finish_reason "abort"; unknown uids are ignored. None = every request."""

    uid: str | None


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one place, from the model's logits before any setting changes them."""

    logprob: float  # of the token that stands there
    top: tuple[tuple[int, float], ...] = ()  # the most probable (id, logprob), best first


class Chunk(NamedTuple):
    """New tokens of one request. The last one carries `finish_reason`; no chunk follows it.

    It does not cross a border: `engine.chunk_reader` makes chunks of updates.
    """

    uid: str
    number: int  # 0, 1, 2, ... without gaps
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # all tokens so far, those of this chunk included
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of token_ids, when asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of prompt[1:], with the first tokens
    error: str = ""  # set when finish_reason is "error"
    error_code: str = ""  # status of the error: INVALID_ARG, UNAVAILABLE, INTERNAL
    stop_token: int | None = None  # the id that ended the request, if one did
    queued: float = 0.0  # seconds from its arrival until it was admitted


class RowReport(NamedTuple):
    """What only some rows of a step have to say."""

    logprobs: tuple[TokenLogprobs, ...] = ()  # of the row's tokens
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens this step reached
    drafts: tuple[int, ...] = ()  # for the row's next step, when it has a grammar


class Started(NamedTuple):
    """A request has taken a row; until it ends or starts again, the row's tokens are its own."""

    row: int
    uid: str
    num_prompt_tokens: int
    num_cached_tokens: int  # that its first admission found
    queued: float  # seconds from its arrival until its first admission


class Ended(NamedTuple):
    """A request's end, after the tokens that the same update has of it."""

    uid: str
    reason: FinishReason
    num_prompt_tokens: int
    error: str = ""
    error_code: str = ""
    stop_token: int | None = None


@dataclass(frozen=True)
class Update:
    """Everything that one step, or what happened between two, has for the client.

    A request is named in `rows` once at most. Read it in the order of the fields.
    """

    started: tuple[Started, ...] = ()
    rows: IntArray = field(default_factory=_no_rows)  # [N] rows with new tokens
    counts: IntArray = field(default_factory=_no_rows)  # [N] how many, at least 1
    tokens: IntArray = field(default_factory=_no_rows)  # [sum(counts)], row after row
    reports: dict[int, RowReport] = field(default_factory=dict)  # by row
    ended: tuple[Ended, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.started or len(self.rows) or self.ended)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        columns = (self.rows.tobytes(), self.counts.tobytes(), self.tokens.tobytes())
        return _update, (self.started, *columns, self.reports, self.ended)


def _update(
    started: tuple[Started, ...],
    rows: bytes,
    counts: bytes,
    tokens: bytes,
    reports: dict[int, RowReport],
    ended: tuple[Ended, ...],
) -> Update:
    return Update(started, _int32(rows), _int32(counts), _int32(tokens), reports, ended)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and gauges of the moment."""

    steps: int
    rows: int  # token rows that went through the target model
    prompt_tokens: int  # of accepted requests
    cached_tokens: int  # that admissions found in the prefix cache
    generated_tokens: int
    drafted_tokens: int
    accepted_by_position: tuple[int, ...]  # drafts accepted, by their place in the step
    preemptions: int
    finished: dict[str, int]  # requests by finish_reason
    running: int
    waiting: int
    pages: int
    free_pages: int
    # Of the newest report: busiest / mean, averaged over the routed layers; 0 = none yet.
    expert_imbalance: float
    rank_imbalance: float
    expert_tokens_by_rank: tuple[int, ...]  # rows times chosen experts that the rank holds


@dataclass(frozen=True)
class Progress:
    """A line for the person who waits for the model to load."""

    text: str


@dataclass(frozen=True)
class EngineFailed:
    """The engine cannot go on; the last message before its process ends."""

    reason: str


@dataclass(frozen=True)
class RanksReady:
    """Every rank has loaded. Bytes by rank: as counted on its tensors, and from the shapes."""

    parameter_bytes: tuple[int, ...]
    share_bytes: tuple[int, ...]


@dataclass(frozen=True)
class EngineInfo:
    """What the engine says once every rank has loaded."""

    vocab_size: int
    max_model_len: int  # prompt + output tokens
    eos_token_ids: tuple[int, ...]
    ranks: int
    engine_pid: int
    rank_pids: tuple[int, ...]
    parameter_bytes: tuple[int, ...]  # of each rank, as loaded
    share_bytes: tuple[int, ...]  # of each rank, from the shapes


@dataclass(frozen=True)
class Shaping:
    """What changes a row's logits before temperature; `sampling_params` says what each means."""

    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    bad_word_ids: tuple[tuple[int, ...], ...]
    prompt: IntArray  # [n] int32; the ranks see only the part that no prefix hit covers
    output: IntArray  # [m] int32, tokens from before a preemption

    @property
    def ids(self) -> int:
        """How many ids it brings along, 5 bytes each at most in a plan; a bias counts as four."""
        tokens = len(self.prompt) + len(self.output) + len(self.allowed_token_ids or ())
        return tokens + 4 * len(self.logit_bias) + sum(map(len, self.bad_word_ids))


@dataclass(frozen=True)
class RowInit:
    """A sequence enters device row `row`: what the ranks keep and advance by themselves."""

    row: int
    seed: int  # 64-bit key of the sampling noise
    temperature: float  # 0 = greedy
    top_p: float
    top_k: int  # 0 = off
    remaining: int  # tokens it may still produce
    stop_token_ids: tuple[int, ...]  # eos and stop ids; empty when eos is ignored
    min_p: float = 0.0
    stops_from: int = 0  # first position at which a stop id may be drawn
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_length: int = 0
    draft_script: DraftScript | None = None
    shaping: Shaping | None = None  # None: logits are drawn from as they are
    grammar: bool = False  # StepMasks say what may be drawn; results report the drafts


@dataclass(frozen=True)
class PageGrant:
    """Physical pages appended to the page table of `row` from logical page `start` on."""

    row: int
    start: int
    pages: IntArray  # [n] int32

    def __reduce__(self) -> tuple[Any, tuple[int, int, bytes]]:
        return _page_grant, (self.row, self.start, self.pages.tobytes())


def _page_grant(row: int, start: int, pages: bytes) -> PageGrant:
    return PageGrant(row, start, _int32(pages))


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens [start, start + length) of `row`.

    `tokens` has one id more than `length` when the prompt goes on: the MTP entry of the chunk's
    last position needs the token after it. Without it the chunk is the prompt's last one, and
    its last position is sampled.
    """

    row: int
    start: int
    length: int
    tokens: IntArray  # [length] or [length + 1] int32
    resumed: bool = False  # the first chunk after a prefix hit of `start` tokens

    @property
    def final(self) -> bool:
        return len(self.tokens) == self.length


@dataclass(frozen=True)
class StepPlan:
    """One step, as changes: lengths, last tokens, drafts and active flags live on the ranks."""

    step: int
    admit: tuple[RowInit, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[int, ...] = ()  # rows that go on; a row that has ended meanwhile yields nothing
    masks_follow: bool = False  # StepMasks come before the next plan


@dataclass(frozen=True)
class StepMasks:
    """What rows with a grammar may draw in a step; made while its forward pass runs.

    A row has one mask a drawing place, in order; places without one are not reached, because
    the grammar forbids a draft ahead of them.
    """

    step: int
    rows: tuple[int, ...]
    masks: tuple[npt.NDArray[np.uint32], ...]  # a row: [places, ceil(vocabulary / 32)] bits
    more: bool = False  # another part of the same step follows


GOES_ON, STOPPED, EXHAUSTED = 0, 1, 2  # a row's `ended`: by a stop id; `remaining` reached zero


@dataclass(frozen=True)
class StepResult:
    """What rank 0 reports for a plan.

    The columns have the rows that drew: decoding ones, then final prefills, in the plan's order.
    A decoding row has accepted one draft less than it confirms tokens.
    """

    step: int
    rows: IntArray = field(default_factory=_no_rows)  # [N]
    counts: IntArray = field(default_factory=_no_rows)  # [N] confirmed tokens, at least 1
    tokens: IntArray = field(default_factory=_no_rows)  # [sum(counts)], row after row
    ended: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))  # [N]
    reports: dict[int, RowReport] = field(default_factory=dict)  # by row, also of other rows
    rows_computed: int = 0  # token rows that went through the target model
    late: bool = False  # a replay that found the one before it done: the device was idle
    # [routed layers, experts] rows that chose each expert since the start; in few results
    expert_totals: npt.NDArray[np.int64] | None = None

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        columns = (self.rows.tobytes(), self.counts.tobytes(), self.tokens.tobytes())
        rest = (self.reports, self.rows_computed, self.late, self.expert_totals)
        return _step_result, (self.step, *columns, self.ended.tobytes(), *rest)


def _step_result(
    step: int, rows: bytes, counts: bytes, tokens: bytes, ended: bytes, *rest: Any
) -> StepResult:
    flags = np.frombuffer(ended, dtype=np.uint8)
    return StepResult(step, _int32(rows), _int32(counts), _int32(tokens), flags, *rest)


def encode(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Inverse of `encode`; only for bytes that another process of ours wrote."""
    return pickle.loads(data)
