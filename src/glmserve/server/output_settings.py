# SPDX-License-Identifier: Apache-2.0
"""What preprocess tells postprocess about a request, as the JSON text of one tensor.

It goes through glm_dsa and comes out with a request's first response only: later responses stay
small, however many tools a request has, and no state is kept between two server models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from glmserve.text.output_options import OutputOptions


@dataclass(frozen=True)
class OutputSettings:
    """How postprocess turns a request's ids into its answer."""

    options: OutputOptions  # how output ids become text, reasoning and tool calls
    echo: str = ""  # the prompt's text, when the answer must repeat it

    def to_json(self) -> str:
        return json.dumps({"options": self.options.to_json(), "echo": self.echo})

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(OutputOptions.from_json(values["options"]), values["echo"])
