"""Bodies of llama.cpp's own endpoints: /completion and /infill."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from luce.server.schema import Common

# -1 says "no limit", "random" or "off" in these fields.
_OrMinusOne = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Bias = Annotated[float, Meta(ge=-100, le=100)] | bool


class NativeRequest(Common, kw_only=True):
    """The body of /completion, and what /infill shares with it. None is the same as absent."""

    prompt: str | list[Any] | None = None
    n_predict: _OrMinusOne | None = None
    max_tokens: _OrMinusOne | None = None
    n_cmpl: Annotated[int, Meta(ge=1)] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    samplers: list[str] | None = None
    # -1: the context, as in llama.cpp.
    repeat_last_n: _OrMinusOne | None = None
    logit_bias: dict[str, _Bias] | list[tuple[int | str, _Bias]] | None = None  # type: ignore[assignment]
    # Accepted without effect: they tune what is off, or how llama.cpp's cache and context are used.
    n_keep: int | None = None
    n_discard: int | None = None
    n_indent: int | None = None
    n_cache_reuse: int | None = None
    t_max_prompt_ms: float | None = None
    t_max_predict_ms: float | None = None
    dynatemp_exponent: float | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    xtc_threshold: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None


class ExtraText(msgspec.Struct):
    """A further file of /infill."""

    text: str = ""
    filename: str = "tmp"


class InfillRequest(NativeRequest, kw_only=True):
    """The body of /infill. `prompt`: text between the prefix and the gap."""

    prompt: str | None = None
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[ExtraText] | None = None
