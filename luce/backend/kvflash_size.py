"""How many positions of a sequence have their keys and values on the devices (KVFlash). Pure.

A sequence may be longer than that. Its first page and its last ones are always resident; of the pages between, those
with the highest scores are (luce.kvcache.paging). Sizes are in positions and multiples of four pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from luce.runtime.step import PAGE

#: pages at the beginning of a sequence that are always resident: attention sinks (StreamingLLM, arXiv 2309.17453)
SINK = 1
#: most positions that `auto` chooses: the time of a step grows with the resident positions, not with the context
AUTO_MOST = 16384
_STEP = 4 * PAGE


@dataclass(frozen=True)
class KVFlashRequest:
    """The value of --kvflash."""

    #: resident positions of a sequence; the most of them if `auto`
    size: int
    #: whether the free memory of the devices decides
    auto: bool = False

    @classmethod
    def parse(cls, text: str) -> KVFlashRequest | None:
        """Of a checked value: `off` (None), `N`, `auto` or `auto:N`."""
        if text == "off":
            return None
        kind, _, number = text.partition(":")
        return cls(int(number or AUTO_MOST), auto=True) if kind == "auto" else cls(int(kind))


def tail_pages(positions: int) -> int:
    """Pages before the newest that are always resident: four, or all that the last `positions` positions touch."""
    return max(4, -(-positions // PAGE) + 1 if positions else 0)


def smallest_size(tail: int) -> int:
    """The smallest number of resident positions where the last `tail` pages are always resident.

    Beside these and the sink it holds the page that is being filled and one that may be swapped out.
    """
    return _round_up((SINK + tail + 2) * PAGE)


def resident_size(wanted: int, tail: int, context: int) -> int | None:
    """The resident positions for a request of `wanted`; None if the context is too short to swap pages out.

    `wanted` is rounded up to whole steps and is at least smallest_size; the context, rounded down, limits it.
    """
    size = max(_round_up(wanted), smallest_size(tail))
    if size > context:
        size = context // _STEP * _STEP
    return size if size >= smallest_size(tail) else None


@dataclass(frozen=True)
class DeviceShare:
    """A device as auto_size sees it."""

    device: str
    #: bytes that are free beside weights and states
    free: int
    #: bytes of one position of a sequence
    position: int

    def positions(self, slots: int) -> int | None:
        """Positions of each of `slots` sequences in half of the free memory; None if they take no memory here."""
        return max(0, self.free) // 2 // (slots * self.position) if self.position else None


def auto_size(devices: Sequence[DeviceShare], slots: int, most: int = AUTO_MOST) -> int:
    """Positions of each of `slots` sequences for which half of the free memory of every device is enough; at most
    `most`."""
    return min([most, *(count for share in devices if (count := share.positions(slots)) is not None)])


def describe_shares(devices: Sequence[DeviceShare], slots: int) -> str:
    """The computation of auto_size, for people."""
    return "; ".join(
        f"{share.device}: {share.free} bytes free / 2 / {slots} sequences / {share.position} bytes per token "
        f"= {share.positions(slots)}"
        for share in devices
        if share.position
    )


def _round_up(positions: int) -> int:
    return math.ceil(positions / _STEP) * _STEP
