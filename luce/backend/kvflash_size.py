"""How many positions of a sequence have their keys and values on the devices: KVFlash's pool. Pure.

A sequence may be longer than its pool. Its first page and its last ones are always there; of those between, the ones
that matter most (luce.kvcache.paging). Sizes are in positions and multiples of four pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from luce.runtime.step import PAGE

#: pages at the beginning of a sequence that never leave: attention rests on them (StreamingLLM, arXiv 2309.17453)
SINK = 1
#: largest pool that `auto` chooses: what a step costs grows with the pool, not with the context
AUTO_MOST = 16384
_STEP = 4 * PAGE


@dataclass(frozen=True)
class Wanted:
    """A pool as it is asked for: `size` positions, or as many as there is room for, `size` at most."""

    size: int
    auto: bool = False

    @classmethod
    def of(cls, text: str) -> Wanted | None:
        """What --kvflash names, which is checked: `off`, `N`, `auto` or `auto:N`."""
        if text == "off":
            return None
        kind, _, number = text.partition(":")
        return cls(int(number or AUTO_MOST), auto=True) if kind == "auto" else cls(int(kind))


def tail_pages(positions: int) -> int:
    """Pages before the newest one that stay: four, or what the last `positions` positions touch."""
    return max(4, -(-positions // PAGE) + 1 if positions else 0)


def smallest_pool(tail: int) -> int:
    """Positions that a pool needs where the last `tail` pages are protected.

    Beside these and the sink, one page that is being filled and one that may leave.
    """
    return _up((SINK + tail + 2) * PAGE)


def pool_size(wanted: int, tail: int, context: int) -> int | None:
    """The pool for `wanted` positions; None if the context is too short to need one.

    Up to whole steps, at least smallest_pool, at most the context, down to whole steps.
    """
    size = max(_up(wanted), smallest_pool(tail))
    if size > context:
        size = context // _STEP * _STEP
    return size if size >= smallest_pool(tail) else None


@dataclass(frozen=True)
class Share:
    """A device as `auto_pool` sees it, in bytes: free beside weights and states, and what a position takes."""

    device: str
    free: int
    position: int

    def holds(self, slots: int) -> int | None:
        """Positions of each of `slots` sequences that half of what is free holds, None if they take nothing here."""
        return max(0, self.free) // 2 // (slots * self.position) if self.position else None


def auto_pool(devices: Sequence[Share], slots: int, most: int = AUTO_MOST) -> int:
    """Positions that half of what is free holds for each of `slots` sequences on every device, at most `most`."""
    return min([most, *(held for share in devices if (held := share.holds(slots)) is not None)])


def explained(devices: Sequence[Share], slots: int) -> str:
    """What auto_pool looks at, for people."""
    return "; ".join(
        f"{share.device}: {share.free} bytes free / 2 / {slots} sequences / {share.position} bytes per token "
        f"= {share.holds(slots)}"
        for share in devices
        if share.position
    )


def _up(positions: int) -> int:
    return math.ceil(positions / _STEP) * _STEP
