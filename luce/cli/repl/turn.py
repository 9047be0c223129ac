"""One reply at the terminal, which Ctrl+C can stop at any moment, and its speed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TypeVar

from rich.console import Console

from luce.cli import progress
from luce.cli.plain_writer import ReplyWriter
from luce.cli.repl.replier import Ending, Messages, Replier, Reply, Request
from luce.text.reasoning import Delta

T = TypeVar("T")


class Interrupt:
    """Ctrl+C during a reply: interrupts a wait at once, but never the drawing. `pressed` stays set."""

    def __init__(self) -> None:
        self.pressed = False
        self._waiting = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def wait(self, function: Callable[[], T]) -> T:
        """The function's result. Raises KeyboardInterrupt if the key is pressed meanwhile, or was before."""
        self._waiting = True
        try:
            # Pressed after the caller last looked: nothing else would end the wait.
            if self.pressed:
                raise KeyboardInterrupt
            return function()
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt


class Turn:
    """The next reply, written to `writer` as it is generated. `console` shows that it is waited for; None: nothing."""

    def __init__(self, replier: Replier, writer: ReplyWriter, interrupt: Interrupt, console: Console | None) -> None:
        self._replier = replier
        self._writer = writer
        self._interrupt = interrupt
        self._console = console
        self._deltas: list[Delta] = []
        #: monotonic times of the request, of the first token and of the last
        self._times = [time.monotonic()]
        self._tokens = 0
        self._prompt: int | None = None
        #: None for a reply that was stopped or failed
        self.ending: Ending | None = None
        #: whether the conversation keeps the reply: it is complete, or has text and was stopped
        self.answered = False

    @property
    def content(self) -> str:
        """The reply without its reasoning."""
        return "".join([delta.content for delta in self._deltas])

    @property
    def reasoning(self) -> str:
        """What the model wrote before the reply."""
        return "".join([delta.reasoning for delta in self._deltas])

    def run(self, messages: Messages, request: Request) -> None:
        """Generate and draw. Raises LuceError, and KeyboardInterrupt if Ctrl+C interrupts a wait."""
        wait = self._interrupt.wait
        reply: Reply | None = None
        console = self._console or Console(stderr=True, force_terminal=False)
        try:
            with progress.shown("reading the prompt", unit="tokens", console=console) as bar:
                replying = reply = wait(lambda: self._replier.reply(messages, request, bar.update))
                self._prompt = reply.prompt
                while not self._interrupt.pressed and (delta := wait(lambda: next(replying, None))) is not None:
                    self._count(reply)
                    if any(delta):
                        bar.end()
                        self._add(delta)
            self.answered = not self._interrupt.pressed
        finally:
            if reply is not None:
                reply.close()
                self.ending = reply.ending
            self._writer.end()
            self.answered = self.answered or (self._interrupt.pressed and any(any(delta) for delta in self._deltas))

    def _count(self, reply: Reply) -> None:
        if reply.tokens > self._tokens:
            self._tokens = reply.tokens
            self._times = [*self._times[:2], time.monotonic()]
            self._writer.status = f"{self._tokens:,} tok"
            if rate := _rate(self._tokens, self._times):
                self._writer.status += f" · {rate:.1f} tok/s"

    def _add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if delta.reasoning:
            self._writer.reason(delta.reasoning)
        if delta.content:
            self._writer.write(delta.content)

    def speed(self) -> str:
        """The line below the reply."""
        ending = self.ending or Ending("stopped")
        if ending.tokens is None or ending.prompt is None:  # stopped, or a server that does not count
            tokens = self._tokens if ending.tokens is None else ending.tokens
            ending = replace(ending, tokens=tokens, prompt=ending.prompt or self._prompt)
        return speed(ending, self._times, context=self._replier.context)


def speed(ending: Ending, times: list[float], *, context: int | None) -> str:
    """The line below a reply. times: monotonic, of the request, of the first token and of the last."""
    tokens = ending.tokens or 0
    parts = [f"{tokens:,} tok"]
    if rate := _rate(tokens, times):
        parts.append(f"{rate:.1f} tok/s")
    if len(times) > 1:
        parts.append(f"first {times[1] - times[0]:.2f} s")
    if ending.prompt is not None:
        parts.append(f"prompt {ending.prompt:,}" + (f" ({ending.cached:,} cached)" if ending.cached else ""))
    if ending.drafted and tokens:
        # Each token that was no draft took a step.
        steps = max(1, tokens - ending.accepted)
        parts.append(f"draft {100 * ending.accepted / tokens:.0f} %, {tokens / steps:.1f} a step")
    if ending.draft_state not in ("", "drafting"):
        parts.append(f"draft {ending.draft_state}")
    if ending.prompt is not None:
        parts.append(f"ctx {ending.prompt + tokens:,}" + (f"/{context:,}" if context else ""))
    return " · ".join(parts)


def _rate(tokens: int, times: list[float]) -> float | None:
    """Tokens per second after the first; None until there are two."""
    if tokens < 2 or len(times) < 3:
        return None
    return (tokens - 1) / max(times[-1] - times[1], 1e-9)
