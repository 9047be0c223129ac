"""The balance of drafting in seconds against plain decoding: drafting may lose a share of the time, no more. Pure.

Estimates of times and of acceptance are noisy, and a drafter that looks as if it paid may lose all the same. So the
outcome of each step with drafts is booked: the seconds of the step and its proposals, against the seconds that its
tokens would have taken without drafts. Steps without drafts earn a share of their time. While the balance is below zero
nothing is drafted.
"""

from __future__ import annotations

#: the share of the time of plain steps that drafts may lose
SHARE = 0.005
# Plain steps' worth of time that are lent, and the most that past gains or losses count for. With one step lent, a
# single step that the host held up ended drafting for 200 steps.
_LENT_STEPS, _MOST_STEPS = 3, 8


class DraftAccount:
    """A balance in seconds."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._balance = 0.0
        self._lent = False

    @property
    def overdrawn(self) -> bool:
        """Whether drafting has lost more than it may."""
        return self._balance < 0

    def affords(self, seconds: float) -> bool:
        """Whether drafts that take so long, and may give nothing, are within what may be lost."""
        return self._balance >= seconds

    def book_plain(self, seconds: float) -> None:
        """A step without drafts ended, which took so long."""
        if not self._lent:
            # Beside what drafts have lost before the first plain step.
            self._lent = True
            self._balance += _LENT_STEPS * seconds
        self._balance += self._share * seconds

    def book_drafted(self, seconds: float, tokens: int, plain: int, plain_seconds: float) -> None:
        """A step with drafts gave `tokens` tokens and took `seconds` with its proposals; without drafts such a step
        gives `plain` tokens in `plain_seconds`."""
        gain = tokens / plain * plain_seconds - seconds
        most = _MOST_STEPS * plain_seconds
        self._balance = min(max(self._balance + gain, min(self._balance, -most)), max(self._balance, most))
