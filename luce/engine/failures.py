"""The boundary between the bookkeeping of one sequence and what all sequences share.

An exception in the bookkeeping of a sequence, from its place in the queue to its last checkpoint, fails this sequence's
request: slot and pages are free, and all other replies go on as if it had not been there. Stages that handle several
sequences collect such exceptions as Failures and go on with the other sequences; the rest of the bookkeeping runs
within `Delivery.bookkeeping`.

Shared by all sequences are a step's forward pass, whose exception fails the sequences of the step, and the accounts of
slots, pages and admission: with an exception there nobody knows any more whose pages are whose, so the engine ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from luce.engine.sequence import Sequence


class Failures(list[tuple[Sequence, Exception]]):
    """The sequences that a stage has failed for, each with its exception."""

    @contextmanager
    def of(self, sequence: Sequence) -> Iterator[None]:
        """Note an exception of the bookkeeping of a sequence, and go on behind the `with` block."""
        try:
            yield
        except Exception as error:
            self.append((sequence, error))
