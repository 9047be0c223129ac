"""Faults in the bookkeeping of one sequence: an exception at the entry of functions that handle it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import luce
from luce.engine.sequence import Sequence

_ROOT = Path(luce.__file__).parent.parent
# Where an account of a sequence is kept; what a backend does for one slot counts as well.
_PLACES = ("luce/engine/", "luce/kvcache/", "tests/support/scripted_backend.py")


class Fault(RuntimeError):
    """No function raises it by itself."""


class Faults:
    """Watches the functions that an engine's thread calls for sequences whose prompts begin with `mark`.

    function  raise at the entry of this one, as `seen` names it; empty: only watch
    call      at which of its calls
    """

    def __init__(self, mark: int, function: str = "", call: int = 1) -> None:
        #: calls of each function
        self.seen: Counter[str] = Counter()
        self.raised = False
        #: whether calls are counted, and the exception still to be raised
        self.active = True
        self._mark = mark
        self._function = function
        self._call = call
        self._sequence: Sequence | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Engines that are made in this context are watched."""
        before = threading.gettrace()
        threading.settrace(self._on_call)
        try:
            yield
        finally:
            threading.settrace(before)  # type: ignore[arg-type]

    def _on_call(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.active or threading.current_thread().name != "luce-engine":
            return
        code = frame.f_code
        path = code.co_filename.removeprefix(f"{_ROOT}/")
        if not path.startswith(_PLACES) or code.co_name in ("<genexpr>", "<listcomp>"):
            return
        if not self._is_about(frame.f_locals):
            return
        name = f"{path.removesuffix('.py').replace('/', '.')}.{code.co_qualname}"
        self.seen[name] += 1
        if name == self._function and self.seen[name] == self._call:
            self.raised = True
            # A trace function that raises is removed, and its exception is the function's.
            raise Fault(name)

    def _is_about(self, values: dict[str, Any]) -> bool:
        """Whether a function has such a sequence among its arguments, or the slot of the newest one."""
        for name, value in values.items():
            sequence = value if isinstance(value, Sequence) else getattr(value, "sequence", None)
            if isinstance(sequence, Sequence) and int(sequence.prompt[0]) == self._mark:
                self._sequence = sequence
                return True
            if name == "slot" and self._sequence is not None and value is not None and value == self._sequence.slot:
                return True
        return False
