"""One reply at the terminal: it can be stopped at any moment, and tells how fast it came."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, TypeVar

from luce.api import Generation, Model
from luce.cli.markdown import Reply
from luce.engine.events import Finished

T = TypeVar("T")


class Interrupt:
    """Ctrl+C while a reply runs: breaks a wait at once, but never a drawing. `pressed` stays set."""

    def __init__(self) -> None:
        self.pressed = False
        self._waiting = False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def wait(self, function: Callable[[], T]) -> T:
        """The function's result. Raises KeyboardInterrupt when the key is pressed meanwhile."""
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
    """What the model says next, drawn by `reply` as it comes."""

    def __init__(self, model: Model, reply: Reply, interrupt: Interrupt) -> None:
        self._model = model
        self._reply = reply
        self._interrupt = interrupt
        self.pieces: list[str] = []
        #: when the reply was asked for, then when each token came
        self._times = [time.monotonic()]
        #: tokens before it
        self._prompt = 0
        self.finish: Finished | None = None
        #: whether it is to be kept: whole, or stopped behind its first text
        self.answered = False

    def run(self, messages: list[dict[str, str]], options: Mapping[str, Any]) -> None:
        """Generate and draw. Raises LuceError, and KeyboardInterrupt if it was stopped in a wait."""
        wait, model = self._interrupt.wait, self._model
        generation: Generation | None = None
        try:
            ids = wait(lambda: model.chat.prompt(messages))
            self._prompt = len(ids)
            tokens = generation = wait(lambda: model.generate(ids, **options))
            while not self._interrupt.pressed and (token := wait(lambda: next(tokens, None))) is not None:
                if token.id >= 0:
                    self._times.append(time.monotonic())
                self.pieces.append(token.text)
                self._reply.write(token.text)
            self.answered = not self._interrupt.pressed
        finally:
            if generation is not None:
                generation.close()
                self.finish = generation.finish
            self._reply.end()
            self.answered = self.answered or (self._interrupt.pressed and any(self.pieces))

    def speed(self, context: int) -> str:
        """The line below the reply."""
        count = len(self._times) - 1 if self.finish is None else self.finish.timings.predicted_tokens
        return speed(count, self._times, self._prompt, self.finish, context=context)


def speed(count: int, times: list[float], prompt: int, finish: Finished | None, *, context: int) -> str:
    """The line after a reply. times: when it was asked for, then when each token came. prompt: tokens before it."""
    parts = [f"{count:,} tok"]
    if len(times) > 2:
        parts.append(f"{(len(times) - 2) / max(times[-1] - times[1], 1e-9):.1f} tok/s")
    if len(times) > 1:
        parts.append(f"first {times[1] - times[0]:.2f} s")
    cached = 0 if finish is None else finish.timings.cached_tokens
    parts.append(f"prompt {prompt:,}" + (f" ({cached:,} cached)" if cached else ""))
    parts.append(f"ctx {prompt + count:,}/{context:,}")
    return " · ".join(parts)
