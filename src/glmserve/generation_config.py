# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's generation_config.json: where its answers end and how it likes to be sampled."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from glmserve.errors import ConfigError
from glmserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerationConfig:
    """`eos_token_ids` is empty when the file does not say; config.json's then hold."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)  # what a request leaves unset

    @classmethod
    def from_directory(cls, directory: str | Path) -> Self:
        """Reads the file; a checkpoint without one gets the defaults of `SamplingParams`."""
        path = Path(directory) / "generation_config.json"
        if not path.exists():
            return cls()
        values: dict[str, Any] = json.loads(path.read_text())
        eos = values.get("eos_token_id")
        ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        if not all(isinstance(token, int) and token >= 0 for token in ids):
            raise ConfigError("generation_config.eos_token_id", eos, "must be token ids")
        known: dict[str, Any] = {
            key: values[key] for key in ("temperature", "top_p", "top_k") if key in values
        }
        if values.get("do_sample") is False:
            known["temperature"] = 0.0
        return cls(ids, SamplingParams.from_mapping(known))
