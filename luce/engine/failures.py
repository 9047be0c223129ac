"""The boundary between the bookkeeping of one sequence and what all sequences share.

An exception in the bookkeeping of a sequence, from its place in the queue to its last checkpoint, fails this sequence's
request: slot and pages are free, and all other replies go on as if it had not been there. Stages that handle several
sequences collect such exceptions as Failures and go on with the other sequences; the rest of the bookkeeping runs
within `Delivery.bookkeeping`.

Shared by all sequences are a step's forward pass, whose exception fails the sequences of the step, and the accounts of
slots, pages and admission: with an exception there nobody knows any more whose pages are whose, so the engine ends.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from luce.engine.sequence import Sequence


class FailureBoundary:
    """A context that ends with the first Exception inside: `on_error` gets it, and it goes no further.

    A generator's context takes three times as long, and a step enters several of each sequence while the devices wait.
    """

    __slots__ = ("_on_error",)

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._on_error(error)
        return True


class Failures(list[tuple[Sequence, Exception]]):
    """The sequences that a stage has failed for, each with its exception."""

    def of(self, sequence: Sequence) -> FailureBoundary:
        """Note an exception of the bookkeeping of a sequence, and go on behind the `with` block."""
        return FailureBoundary(lambda error: self.append((sequence, error)))
