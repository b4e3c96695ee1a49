# SPDX-License-Identifier: Apache-2.0
"""Tokenizer files for synthetic checkpoints: GLM's pre-tokenizer, a small vocabulary.

Writes tokenizer.json, tokenizer_config.json and chat_template.jinja so that the checkpoint loads
here and in transformers. The base vocabulary is the 256 bytes and merges learnt from a short
built-in text; the 36 added tokens follow it in GLM's order. Weights and generation_config.json
are not its job.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from glmserve.errors import ConfigError
from glmserve.text import markers
from glmserve.text.synthetic_corpus import CORPUS

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PADDING = 8  # rows of the model's head that stay without text, as GLM's last 24 do
MIN_VOCAB_SIZE = 256 + len(markers.ADDED_TOKENS) + _PADDING


@dataclass(frozen=True)
class TokenizerInfo:
    """What the rest of a checkpoint must agree with."""

    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    vocab_size: int  # ids that have an entry; the rows above it are padding


def write_tokenizer(
    directory: str | Path, vocab_size: int, seed: int = 0, texts: Sequence[str] | None = None
) -> TokenizerInfo:
    """Write the tokenizer files for a model whose head has `vocab_size` rows.

    With `texts` the merges are learnt from them, none across digits, and `seed` is not used. The
    same arguments give the same bytes. Raises ConfigError if the byte alphabet, the added tokens
    and some padding do not fit into `vocab_size`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError("vocab_size", vocab_size, f"a tokenizer needs at least {MIN_VOCAB_SIZE}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train(vocab_size - len(markers.ADDED_TOKENS) - _PADDING, seed, texts)
    tokenizer.add_tokens(
        [
            AddedToken(name, special=special, normalized=False)
            for name, special in markers.ADDED_TOKENS
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(_tokenizer_config(), indent=2) + "\n", encoding="utf-8"
    )
    (directory / "chat_template.jinja").write_text(
        template_source(), encoding="utf-8", newline="\n"
    )
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return TokenizerInfo(
        eos_token_ids=tuple(ids[name] for name in markers.EOS),
        pad_token_id=ids[markers.PAD],
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
    )


def template_source() -> str:
    """The chat template of synthetic checkpoints (GLM-5.3's behaviour)."""
    return resources.files("glmserve.text").joinpath("chat_template.jinja").read_text("utf-8")


def _train(base_size: int, seed: int, texts: Sequence[str] | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    single_digits = [pre_tokenizers.Digits(individual_digits=True)] if texts is not None else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, *single_digits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if texts is None:
        # The seed leaves out a few lines, so that two seeds give two vocabularies.
        lines = CORPUS.split("\n")
        kept = random.Random(seed).sample(lines, k=len(lines) - len(lines) // 10)
        texts = ["\n".join(kept)]
    trainer = BpeTrainer(
        vocab_size=base_size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])  # GLM's
    return tokenizer


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": markers.ENDOFTEXT,
        "pad_token": markers.PAD,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 1048576,
    }
