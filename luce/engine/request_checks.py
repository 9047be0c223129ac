"""What a prompt and the tokens of a reply must be before an engine takes them. Any thread may ask."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from luce.config.sampling import SamplingParams
from luce.engine.sequence import Sequence
from luce.errors import ContextError, RequestError
from luce.runtime.step import Int32


def checked_prompt(prompt: Many[int], params: SamplingParams, *, vocab: int, context: int) -> Int32:
    """The ids of a prompt, int32 [n]. Raises RequestError and ContextError."""
    if not len(prompt):
        raise RequestError("the prompt has no tokens", param="prompt", code="invalid_value")
    need = len(prompt) + (params.max_tokens != 0)
    if need > context:
        raise ContextError(
            f"This model's maximum context length is {context} tokens. However, your messages resulted in "
            f"{len(prompt)} tokens. Please reduce the length of the messages.",
            tokens=len(prompt),
            context=context,
        )
    try:
        ids = np.array(prompt, np.int64)
    except OverflowError:
        ids = np.array([-1], np.int64)
    if ids.min() < 0 or ids.max() >= vocab:
        raise RequestError(f"the prompt has ids outside 0..{vocab - 1}", param="prompt", code="invalid_value")
    if params.logit_bias and not 0 <= min(params.logit_bias) <= max(params.logit_bias) < vocab:
        raise RequestError(f"logit_bias has ids outside 0..{vocab - 1}", param="logit_bias", code="invalid_value")
    return ids.astype(np.int32)


def set_position_ids(sequence: Sequence, ids: Int32, positions: int) -> None:
    """Let a prompt have these position ids, int32 [n], in a model of so many positions. Raises RequestError."""
    rest = positions - 1 - int(ids.max(initial=0))
    ascending = ids.shape == sequence.prompt.shape and ids[0] >= 0 and bool((np.diff(ids) > 0).all())
    if not ascending or rest < min(1, sequence.max_new_tokens):
        raise RequestError("position ids: not one for each token, ascending, in the model's context")
    sequence.position_ids = ids
    sequence.max_new_tokens = min(sequence.max_new_tokens, rest)


def check_given(given: Many[int], sequence: Sequence, *, vocab: int, paged: bool) -> None:
    """Raises RequestError if a reply cannot begin with these tokens. `paged`: KVFlash swaps its pages, and which are on
    the devices depends on all steps so far."""
    if sequence.scores_prompt or paged:
        raise RequestError("a reply goes on neither with scores of its prompt nor with KVFlash")
    if len(given) > sequence.max_new_tokens or not all(0 <= token < vocab for token in given):
        raise RequestError("the tokens that the reply begins with are too many, or none of the vocabulary")
