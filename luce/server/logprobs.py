"""Log probabilities of tokens in OpenAI's shape."""

from __future__ import annotations

import math
from typing import Any

from luce.engine.events import Token
from luce.text.tokenizer import Tokenizer

_Json = dict[str, Any]

# JSON has no infinity; OpenAI sends this for a token that cannot occur.
_LEAST = -9999.0


def finite(logprob: float | None) -> float | None:
    """A log probability as a JSON number, None for NaN."""
    return None if logprob is None else max(logprob, _LEAST) if not math.isnan(logprob) else None


def scored(token: Token, tokenizer: Tokenizer) -> _Json:
    """A generated token with its log probability, and its most probable alternatives as `top_logprobs`."""
    top = [_entry(other, logprob, tokenizer) for other, logprob in token.top]
    return {**_entry(token.id, token.logprob, tokenizer), "top_logprobs": top}


def _entry(token: int, logprob: float | None, tokenizer: Tokenizer) -> _Json:
    return {
        "token": tokenizer.token_text(token),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }
