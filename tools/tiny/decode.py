# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of the twin to held-out prompts, many at once, without a cache.

A quick look during training; what counts is measured through the server (`tools/evaluate.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from tools.tiny import corpus
from tools.tiny.conversation import Conversation, full_text, render
from tools.tiny.objective import Batch, Runner
from tools.tiny.tokens import Encoder

MAX_NEW = 150


def prompt_of(conversation: Conversation) -> str:
    return render(conversation, conversation.messages[:-1], True)


def fits(conversation: Conversation, encoder: Encoder, topk: int, longest: int) -> bool:
    """Whether a prompt's length is as scored: look-ups reach back at least four times `topk`."""
    length = len(encoder.encode(prompt_of(conversation)))
    least = 4 * topk if conversation.task == "lookup" else 0
    return least <= length <= longest


@torch.inference_mode()
def answers(
    runner: Runner, encoder: Encoder, prompts: list[list[int]], sparse: bool, device: str
) -> list[list[int]]:
    """Token ids after each prompt, up to and with the marker that ends the turn."""
    count = len(prompts)
    width = -(-(max(map(len, prompts)) + MAX_NEW) // 64) * 64
    ids = torch.zeros(count, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    ids = ids.to(device)
    positions = torch.arange(width, device=device).repeat(count, 1)
    batch = Batch(ids, positions, torch.zeros_like(ids), torch.zeros(0))
    ends = torch.tensor([*encoder.ends], device=device)
    row_numbers = torch.arange(count, device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    for step in range(MAX_NEW):
        used = -(-(int(lengths.max())) // 64) * 64
        part = Batch(ids[:, :used], positions[:, :used], batch.documents[:, :used], batch.weights)
        hidden = runner.forward(part, sparse=count if sparse else 0).hidden
        drawn = runner.twin.logits(hidden[row_numbers, lengths - 1]).float().argmax(-1)
        running = ~done
        ids[row_numbers[running], lengths[running]] = drawn[running]
        lengths += running
        done |= torch.isin(drawn, ends)
        if step % 8 == 7 and bool(done.all()):
            break
    rows, stops = ids.cpu().numpy(), lengths.cpu().numpy()
    return [[int(t) for t in rows[i, len(prompts[i]) : stops[i]]] for i in range(count)]


def scores(
    runner: Runner,
    encoder: Encoder,
    count: int,
    seed: int,
    device: str,
    sparse: bool = True,
    longest: int = 850,
    tasks: Iterable[str] = corpus.SCORED,
) -> dict[str, float]:
    """Share of held-out prompts whose answer after the reasoning is the expected one, by task."""
    out = {}
    for task in tasks:
        conversations = corpus.held_out(
            task, count, seed, lambda c: fits(c, encoder, runner.twin.config.index_topk, longest)
        )
        texts = [prompt_of(c) for c in conversations]
        got = answers(runner, encoder, [encoder.encode(t) for t in texts], sparse, device)
        right = []
        for conversation, text, ids in zip(conversations, texts, got, strict=True):
            wanted = full_text(conversation)[len(text) :].split("</think>")[-1]
            said = encoder.tokenizer.decode(ids, skip_special_tokens=False)
            right.append(said.split("</think>")[-1] == wanted)
        out[task] = float(np.mean(right))
    return out
