"""What tests of the engine do with one: submit to it, hold its steps, collect its events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from luce.config.sampling import SamplingParams
from luce.engine.admission import SequenceHandle
from luce.engine.engine_options import EngineOptions
from luce.engine.events import Event, Failed, Finished, Tokens
from luce.engine.loop import Engine
from luce.engine.reasoning_limit import ReasoningLimit
from luce.engine.sequence import Constraint
from luce.errors import LuceError
from luce.runtime.step import Step
from tests.support.scripted_backend import ScriptedBackend

EOS, STOP = 1, 2
#: a prompt for tests of drafting
PROMPT = (20, 21, 22)
#: seconds without progress that end a test
TIMEOUT = 60.0


class Letters:
    """Text of a reply: id 10 is "a" and so on; what follows the last complete pair of letters is held back."""

    def __init__(self, stop: str | None = None, broken: bool = False) -> None:
        self.stopped: str | None = None
        self.texts = ()
        self._stop = stop
        self._held = ""
        self._broken = broken

    def push(self, token: int) -> str:
        if self._broken:
            raise ValueError("no such letter")
        self._held += chr(ord("a") + (token - 10) % 26)
        if len(self._held) < 2:
            return ""
        text, self._held = self._held, ""
        if self._stop is not None and self._stop in text:
            self.stopped = self._stop
            return text[: text.index(self._stop)]
        return text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


@dataclass
class Reply:
    """Collects events; `wait` returns the last one."""

    events: list[Event] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    on: Callable[[Event], None] | None = None

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self.over.set()
        if self.on is not None:
            self.on(event)

    def wait(self) -> Finished | Failed:
        # Thousands of tokens may take minutes on a machine with other work.
        seen = -1
        while not self.over.wait(TIMEOUT):
            assert len(self.events) > seen, "no further event, and no last one"
            seen = len(self.events)
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last

    def finished(self) -> Finished:
        last = self.wait()
        assert isinstance(last, Finished), last
        return last

    def failed(self) -> LuceError:
        last = self.wait()
        assert isinstance(last, Failed), last
        return last.error

    @property
    def ids(self) -> list[int]:
        return [token.id for event in self.events if isinstance(event, Tokens) for token in event.tokens]

    @property
    def text(self) -> str:
        return "".join(t.text for e in self.events if isinstance(e, Tokens) for t in e.tokens) + self.finished().text


class Gate:
    """A hook that holds every step until it is opened, or `let` through; `reached` says that a step waits."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self._allowed = threading.Semaphore(0)

    def __call__(self, step: Step) -> None:
        self.reached.set()
        while not self.open.is_set() and not self._allowed.acquire(timeout=0.01):
            pass

    def wait(self) -> None:
        assert self.reached.wait(TIMEOUT)

    def let(self) -> None:
        """Let one step pass."""
        self._allowed.release()


def make_engine(backend: Any, **options: Any) -> Engine:
    """An engine. `options`: fields of EngineOptions, parameters of Engine; the chunk is the scripted backend's own."""
    parts = {
        name: options.pop(name)
        for name in ("disk", "kvflash", "drafter", "feature_tails", "on_verified")
        if name in options
    }
    if "chunk" not in options:
        options["chunk"] = backend.chunk
    settings = {"eos": frozenset(), "max_queue": 64} | options
    return Engine(backend, EngineOptions(**settings), **parts)


@contextmanager
def engine(backend: ScriptedBackend, **options: Any) -> Iterator[Engine]:
    made = make_engine(backend, **({"eos": frozenset({EOS})} | options))
    try:
        yield made
        assert made.wait_idle(TIMEOUT)
        stats = made.stats()
        assert (stats.waiting, stats.running, stats.pages_used, stats.stalled) == (0, 0, 0, 0)
    finally:
        if isinstance(backend.hook, Gate):
            backend.hook.open.set()
        made.close()
    assert backend.broken is None


def submit(
    made: Engine,
    prompt: Sequence[int] = (20, 21, 22),
    *,
    output: Any = None,
    on: Callable[[Event], None] | None = None,
    session: str = "",
    timeout: float = 0,
    reasoning: ReasoningLimit | None = None,
    constraint: Constraint | None = None,
    **params: Any,
) -> tuple[Reply, SequenceHandle]:
    reply = Reply(on=on)
    handle = made.submit(
        prompt,
        SamplingParams(**({"max_tokens": 6} | params)),
        output=output or Letters(),
        on_event=reply,
        session=session,
        timeout=timeout,
        reasoning=reasoning,
        constraint=constraint,
    )
    return reply, handle


def same(reply: Reply, plain: Reply) -> None:
    """Holds two replies to the same tokens, texts, log probabilities and end."""
    tokens, expected = (
        [token for event in one.events if isinstance(event, Tokens) for token in event.tokens] for one in (reply, plain)
    )
    assert tokens == expected
    ends = reply.finished(), plain.finished()
    assert len({(end.reason, end.text, end.stop) for end in ends}) == 1


def draft_counts(made: Engine) -> tuple[int, int, int]:
    """Verifications, verified draft rows, accepted draft rows."""
    stats = made.stats().draft
    assert stats is not None
    return stats.steps, stats.proposed, stats.accepted
