"""The sampling values. One field of SamplingParams is a row of this table: everything else reads it.

A row with a Sampler is a field of requests (server), a keyword of Model.generate (api), and a name of `/set` and
`luce run -o` (cli); with a `setting` it is also a flag and a TOML key (config.settings). So a new sampler is a row
here, its code in luce.engine.sampling, and its test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from luce.config.values import integer, number, tokens

_MOST = 2**31 - 1


@dataclass(frozen=True)
class Sampler:
    """Range, help and names of one sampling value."""

    kind: type[int] | type[float]
    low: float
    high: float
    #: one line for `--help` and the sample file
    help: str = ""
    #: `low` itself is not allowed
    above: bool = False
    #: what requests get where neither a setting nor the model's makers say it; None: there is no such setting, and
    #: a request without the value gets the field's default
    setting: float | None = None
    #: further names in requests, llama.cpp's first
    aliases: tuple[str, ...] = ()
    #: its key below `general.sampling.` of model files
    file_key: str = ""
    #: further flags, without dashes
    flags: tuple[str, ...] = ()
    #: whether the value counts tokens, so that 4k is 4096
    tokens: bool = False
    #: placeholder of the value in `--help`
    metavar: str = ""
    #: shown by `/set` if the value is None
    unset: str = ""

    def parse(self, text: str) -> Any:
        """The value of a text. Raises ValueError that names the range."""
        if self.tokens:
            return tokens(int(self.low), int(self.high))(text)
        if self.kind is int:
            return integer(int(self.low), int(self.high))(text)
        return number(self.low, self.high, above=self.above)(text)


def _row(
    default: float | None, kind: type[int] | type[float], low: float, high: float, help: str = "", **more: Any
) -> Any:
    return field(default=default, metadata={"sampler": Sampler(kind, low, high, help, **more)})


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one sequence are chosen. Ranges are checked where values enter (server, cli, api), not here.

    Order: logit bias, penalties, then (temperature 0: argmax, lowest id on ties) top-k, temperature, top-p, min-p,
    draw.
    """

    temperature: float = _row(
        0.0,
        float,
        0,
        2,
        "sampling temperature (0: always the likeliest token)",
        setting=0.7,
        metavar="T",
        flags=("temp",),
        file_key="temp",
    )
    top_k: int = _row(
        0,
        int,
        -1,
        _MOST,
        "sample from the K likeliest tokens (0 or -1: off)",
        setting=40,
        metavar="K",
        file_key="top_k",
    )
    top_p: float = _row(
        1.0,
        float,
        0,
        1,
        "sample from the likeliest tokens whose probabilities add up to P (1: off)",
        above=True,
        setting=0.95,
        metavar="P",
        file_key="top_p",
    )
    min_p: float = _row(
        0.0,
        float,
        0,
        1,
        "sample from tokens with at least P times the probability of the likeliest (0: off)",
        setting=0.0,
        metavar="P",
        file_key="min_p",
    )
    # From 0.01: float32 logits divided by a number near 0 overflow, and the reply has no likeliest token then.
    repetition_penalty: float = _row(
        1.0,
        float,
        0.01,
        10,
        "penalty for tokens that occur in the text already (1: off)",
        setting=1.0,
        aliases=("repeat_penalty", "rep_pen"),
        file_key="penalty_repeat",
        metavar="X",
    )
    #: tokens before the next one to which repetition_penalty applies
    repeat_last_n: int = _row(256, int, 0, _MOST, aliases=("rep_window",), tokens=True)
    frequency_penalty: float = _row(0.0, float, -2, 2)
    presence_penalty: float = _row(
        0.0, float, -2, 2, "penalty for tokens that occur in the reply already (0: off)", setting=0.0, metavar="X"
    )
    #: token id to the number that is added to its logit
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = _row(None, int, -(2**63), 2**63 - 1, unset="random")
    #: 0 ends the sequence after its prompt; endpoints with a reply ask for 1 at least
    max_tokens: int | None = _row(None, int, 1, _MOST, unset="until the context is full", tokens=True)
    min_tokens: int = _row(0, int, 0, _MOST, tokens=True)
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    #: alternatives reported beside each token's log probability in the unmodified distribution (None: report nothing)
    logprobs: int | None = None
    #: the same for every position of the prompt
    prompt_logprobs: int | None = None
    #: report the raw logits of every position of the prompt (PromptLogits events)
    prompt_logits: bool = False


SAMPLERS: Mapping[str, Sampler] = {
    row.name: row.metadata["sampler"] for row in dataclasses.fields(SamplingParams) if "sampler" in row.metadata
}
