"""The boundary between one sequence's bookkeeping and what all share: a fault at every function that handles a
sequence fails this sequence at most, and leaves nothing behind."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

from luce.engine.events import Failed, Finished, FinishReason, Tokens
from luce.engine.failures import Failures
from luce.engine.sequence import Sequence
from luce.kvcache.paging import KVFlash
from luce.kvcache.policies import AgePolicy
from tests.support.cached_engine import ids
from tests.support.drafters import oracle, sometimes
from tests.support.faults import Faults
from tests.support.replies import TIMEOUT, Gate, Reply, engine, make_engine, submit
from tests.support.scripted_backend import ScriptedBackend

MARK = 96
#: prompts of two sequences that begin alike: the second one resumes where the first one ended
VICTIMS = ([MARK, *ids(500, seed=3)], [MARK, *ids(500, seed=3), *ids(10, seed=4)])
OTHERS = ([5, *ids(90, seed=1)], [6, *ids(20, seed=2)])

#: models, and what only they have
KINDS: dict[str, dict[str, Any]] = {"recurrent": {"recurrent": True}, "paged": {"bound": 7, "recurrent": True}}
STAGES = [
    *[("recurrent", module) for module in ("checkpoints", "commit", "drafted", "reply", "scheduler", "speculate")],
    *[("recurrent", f"kvcache.{module}") for module in ("memory_tier", "page_table", "prefix_cache", "restorer")],
    ("recurrent", "scripted_backend"),
    ("paged", "sequence_paging"),
    ("paged", "kvcache.paging"),
    ("paged", "kvcache.policies"),
]
#: the accounts that all sequences share, and the boundary itself
SHARED = ("admission", "delivery", "failures", "loop", "sequence")
SHARED_FUNCTIONS = {
    "luce.engine.scheduler.Scheduler.admit",
    "luce.engine.scheduler.Scheduler.remove",
    *(f"luce.kvcache.page_table.{table}.release" for table in ("PageTable", "PageTables")),
    *(f"luce.kvcache.page_table.PageTable.{name}" for name in ("clear", "held")),
}


def run(kind: str, function: str = "", call: int = 1) -> tuple[Faults, list[Reply]]:
    """The replies of the other sequences and of the victims, and the engine's state behind them."""
    backend = ScriptedBackend(slots=3, chunk=128, context=1024, **KINDS[kind])
    faults = Faults(MARK, function, call)
    paged: dict[str, Any] = {}
    if kind == "paged":
        paged["kvflash"] = KVFlash(AgePolicy(), 4, 64, 1 << 20)
    with faults.watching():
        made = make_engine(
            backend,
            cache_bytes=1 << 20,
            drafter=oracle(backend, wrong=sometimes(0.3, 1)),
            verify_width=4,
            **paged,
        )
    try:
        sampled: dict[str, Any] = {"temperature": 0.8, "seed": 2, "logprobs": 2, "max_tokens": 12}
        others = [submit(made, OTHERS[0], max_tokens=40)[0], submit(made, OTHERS[1], **sampled)[0]]
        victims = []
        for prompt in VICTIMS:
            victims.append(submit(made, prompt, **sampled)[0])
            victims[-1].wait()
        # A later request meets nothing that the fault has left behind.
        faults.active = False
        later, _ = submit(made, VICTIMS[1], **sampled)
        for reply in (*others, later):
            reply.finished()
        assert made.wait_idle(TIMEOUT)
        stats = made.stats()
        assert (stats.waiting, stats.running, stats.pages_used, stats.stalled) == (0, 0, 0, 0)
    finally:
        made.close()
    assert backend.broken is None
    return faults, [*others, later, *victims]


def said(reply: Reply) -> list[Any]:
    tokens = [token for event in reply.events if isinstance(event, Tokens) for token in event.tokens]
    return [(token.id, token.text, token.logprob) for token in tokens]


@functools.cache
def without_faults(kind: str) -> tuple[Counter[str], list[list[Any]]]:
    """The functions that handle a victim, and what all replies say."""
    faults, replies = run(kind)
    return faults.seen, [said(reply) for reply in replies]


def module_of(function: str) -> str:
    """As in STAGES."""
    parts = function.removeprefix("luce.").removeprefix("engine.").removeprefix("tests.support.").split(".")
    return ".".join(parts[: 1 + (parts[0] == "kvcache")])


@pytest.mark.parametrize(("kind", "module"), STAGES)
def test_a_fault_fails_its_own_request_only(kind: str, module: str) -> None:
    functions, expected = without_faults(kind)
    injected = [name for name in functions if module_of(name) == module and name not in SHARED_FUNCTIONS]
    assert injected
    failed = 0
    for function in injected:
        # At the first call, and in the midst of a reply.
        for call in sorted({1, -(-functions[function] // 2)}):
            faults, replies = run(kind, function, call)
            assert faults.raised, (function, call)
            for index, (reply, tokens) in enumerate(zip(replies, expected, strict=True)):
                last = reply.events[-1]
                if isinstance(last, Failed):
                    assert index >= 3 and last.error.status >= 500, (function, call, last.error)
                    failed += 1
                else:
                    assert said(reply) == tokens, (function, call, index)
    # A drafter or a cached prefix that fails costs nothing but time.
    assert failed or module == "kvcache.restorer"


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_that_handles_a_sequence_is_a_stage(kind: str) -> None:
    stages = {module for _, module in STAGES}
    assert {module_of(name) for name in without_faults(kind)[0]} <= stages | set(SHARED)


def test_failures_are_noted_and_the_others_go_on() -> None:
    failures, (first, second) = Failures(), (Sequence(prompt, 1) for prompt in ([1], [2]))  # type: ignore[arg-type]
    for sequence in (first, second):
        with failures.of(sequence):
            assert sequence is second
    # What is no fault of a sequence ends the engine.
    with pytest.raises(KeyboardInterrupt), failures.of(second):
        raise KeyboardInterrupt
    ((failed, error),) = failures
    assert failed is first and isinstance(error, AssertionError)


def test_a_sink_that_fails_beside_a_deadline_ends_nobody_else() -> None:
    gate = Gate()
    backend = ScriptedBackend(slots=3, hook=gate)

    def fail(event: object) -> None:
        if isinstance(event, Tokens):
            raise RuntimeError("the client is gone")

    with engine(backend, eos=frozenset()) as made:
        # Both are past their deadline when the first one's end delivers the other one's tokens.
        first, _ = submit(made, [30, 31], max_tokens=200, timeout=0.05)
        second, _ = submit(made, [40, 41], max_tokens=200, timeout=0.05, on=fail)
        good, _ = submit(made, [50, 51], max_tokens=30)
        gate.wait()
        second.over.wait(0.1)
        gate.open.set()
        last = first.finished()
        assert last.reason is FinishReason.DEADLINE and isinstance(second.wait(), Failed | Finished)
        good.finished()
    assert good.ids == backend.reply([50, 51], 30)
