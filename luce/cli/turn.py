"""One reply at the terminal, which Ctrl+C can stop at any moment, and its speed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, TypeVar

from luce.api import Generation, Model
from luce.cli.markdown import ReplyWriter
from luce.engine.events import Finished

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
        """The function's result. Raises KeyboardInterrupt if the key is pressed meanwhile."""
        self._waiting = True
        try:
            return function()
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt


class Turn:
    """The next reply of the model, written to `reply` as it is generated."""

    def __init__(self, model: Model, reply: ReplyWriter, interrupt: Interrupt) -> None:
        self._model = model
        self._reply = reply
        self._interrupt = interrupt
        self.pieces: list[str] = []
        #: monotonic times of the request and of each token
        self._times = [time.monotonic()]
        #: tokens of the prompt
        self._prompt = 0
        self.finish: Finished | None = None
        #: whether the conversation keeps the reply: it is complete, or has text and was stopped
        self.answered = False

    def run(self, messages: list[dict[str, str]], options: Mapping[str, Any]) -> None:
        """Generate and draw. Raises LuceError, and KeyboardInterrupt if Ctrl+C interrupts a wait."""
        wait, model = self._interrupt.wait, self._model
        generation: Generation | None = None
        try:
            ids = wait(lambda: model.chat.prompt(messages))
            self._prompt = len(ids)
            tokens = generation = wait(lambda: model.generate(ids, **options))
            while not self._interrupt.pressed and (token := wait(lambda: next(tokens, None))) is not None:
                self._times.append(time.monotonic())
                self._add(token.text)
            if generation.finish is not None:
                self._add(generation.finish.text)
            self.answered = not self._interrupt.pressed
        finally:
            if generation is not None:
                generation.close()
                self.finish = generation.finish
            self._reply.end()
            self.answered = self.answered or (self._interrupt.pressed and any(self.pieces))

    def _add(self, text: str) -> None:
        self.pieces.append(text)
        self._reply.write(text)

    def speed(self, context: int) -> str:
        """The line below the reply."""
        count = len(self._times) - 1 if self.finish is None else self.finish.timings.predicted_tokens
        return speed(count, self._times, self._prompt, self.finish, context=context)


def speed(count: int, times: list[float], prompt: int, finish: Finished | None, *, context: int) -> str:
    """The line below a reply. times: monotonic, of the request and of each token. prompt: tokens of the prompt."""
    parts = [f"{count:,} tok"]
    if len(times) > 2:
        parts.append(f"{(len(times) - 2) / max(times[-1] - times[1], 1e-9):.1f} tok/s")
    if len(times) > 1:
        parts.append(f"first {times[1] - times[0]:.2f} s")
    cached = 0 if finish is None else finish.timings.cached_tokens
    parts.append(f"prompt {prompt:,}" + (f" ({cached:,} cached)" if cached else ""))
    parts.append(f"ctx {prompt + count:,}/{context:,}")
    return " · ".join(parts)
