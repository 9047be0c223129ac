"""A small model as drafter: where it is the target itself, it proposes the target's greedy reply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from luce.draft.drafter import Draftable
from luce.draft.small_model import ModelDrafter, check_tokens
from luce.errors import ModelError
from luce.gguf.reader import open_gguf
from luce.runtime.host import HostDevice
from luce.runtime.step import Span, Step
from luce.shard.local import LocalShard
from tests.support.reference import Reference

FAMILIES = ["qwen3-a-F32", "qwen35-a-F32", "gemma4-e-F32", "laguna-a-F32", "qwen35moe-a-F32"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def drafter(stack: ExitStack, name: str, *, slots: int = 1, context: int = 256) -> ModelDrafter:
    reference = Reference(name)
    file = stack.enter_context(open_gguf(reference.path))
    found = ModelDrafter(file, reference.spec, HostDevice(), slots=slots, context=context)
    stack.callback(found.close)
    return found


def text(name: str) -> tuple[NDArray[np.int32], int]:
    """Prompt and greedy reply, and where the reply begins."""
    expected = Reference(name).expected
    return np.concatenate([expected["prompt_17"], expected["greedy_17"]]), len(expected["prompt_17"])


def propose(model: ModelDrafter, tokens: NDArray[np.int32], slot: int = 0, most: int = 99) -> list[int]:
    (proposal,) = model.propose([Draftable(slot, tokens, most)])()
    return list(proposal.tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_target_itself(name: str, stack: ExitStack) -> None:
    # Steps of other lengths than the proposals': what was drafted beyond the text has to be forgotten.
    model, (tokens, begin) = drafter(stack, name), text(name)
    at = begin + 1
    for accepted in (1, 3, 2, 5):
        model.observe([Span(0, 0, 3, at - 1)])
        drafted = propose(model, tokens[:at])
        assert drafted and drafted == tokens[at : at + len(drafted)].tolist()
        at += accepted


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_read_is_not_read_again(name: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tokens, begin) = drafter(stack, name), text(name)
    read: list[int] = []
    forward = LocalShard.forward

    def counted(self: LocalShard, step: Step, *given: Any) -> Any:
        read.append(step.rows if not len(step.output_rows) else 0)
        return forward(self, step, *given)

    monkeypatch.setattr(LocalShard, "forward", counted)
    at, found = begin + 1, []
    for accepted in (1, 3, 2, 5, 1):
        propose(model, tokens[:at])
        # The seed and the proposed tokens behind it are verified.
        model.observe([Span(0, 0, 6, at - 1, speculative=True)])
        found.append(sum(read))
        read.clear()
        at += accepted
    # The prompt, then what lies between two seeds.
    assert found == [begin, 0, 2, 1, 4]


@pytest.mark.parametrize("name", FAMILIES)
def test_another_text_from_some_position_on(name: str, stack: ExitStack) -> None:
    model, (tokens, begin) = drafter(stack, name, slots=2), text(name)
    propose(model, tokens[::-1].copy())
    model.observe([Span(0, 0, 5, 9)])
    other = np.concatenate([tokens[::-1][:9], tokens[: begin + 1]])
    assert propose(model, other) == propose(model, other, slot=1)


def test_several_sequences(stack: ExitStack) -> None:
    model, (tokens, begin) = drafter(stack, "qwen35-a-F32", slots=3), text("qwen35-a-F32")
    asked = [Draftable(2, tokens[: begin + 1], 9), Draftable(0, tokens[:9], 2), Draftable(1, tokens[: begin + 5], 1)]
    both = [list(proposal.tokens) for proposal in model.propose(asked)()]
    assert [len(ids) <= one.max_tokens for ids, one in zip(both, asked, strict=True)] == [True] * 3
    assert both[0] == tokens[begin + 1 : begin + 1 + len(both[0])].tolist()
    assert both[2] == [tokens[begin + 5]]


def test_a_context_shorter_than_the_text(stack: ExitStack) -> None:
    # Told at once, it reads the last positions only, as if the text began there.
    tokens = Reference("qwen3-a-F32").expected["prompt_long"]
    short, long = drafter(stack, "qwen3-a-F32", context=64), drafter(stack, "qwen3-a-F32")
    assert propose(short, tokens) == propose(long, tokens[-65:])
    for at in range(100, len(tokens)):
        assert propose(short, tokens[:at])


def test_tokens_must_be_the_target_s() -> None:
    with (
        open_gguf(Reference("qwen3-a-F32").path) as file,
        open_gguf(Reference("qwen3-a-MIX").path) as same,
        open_gguf(Reference("gemma4-e-F32").path) as other,
    ):
        check_tokens(file, same.metadata)
        with pytest.raises(ModelError, match=r"qwen3-a-F32.gguf: has another vocabulary than .*gemma4-e-F32.gguf"):
            check_tokens(file, other.metadata)
