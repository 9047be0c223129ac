"""Greedy replies of a loaded model."""

from __future__ import annotations

import luce


def ask(model: luce.Model, prompt: list[int], n: int) -> tuple[list[int], int]:
    """(greedy reply, tokens from the cache)."""
    generation = model.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)
    tokens = [token.id for token in generation]
    assert generation.finish is not None
    return tokens, generation.finish.timings.cached_tokens
