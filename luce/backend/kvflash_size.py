"""The number of resident positions of a sequence: their keys and values are on the devices (KVFlash). Pure.

A sequence may have more positions. Its first page and its last pages are always resident; of the other pages, those
with the highest scores are resident (luce.kvcache.paging). Sizes are in positions and multiples of four pages.
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

    #: resident positions of a sequence; with `auto`, the most resident positions
    size: int
    #: whether the free memory of the devices sets the number
    auto: bool = False

    @classmethod
    def parse(cls, text: str) -> KVFlashRequest | None:
        """Parse a checked value: `off` (None), `N`, `auto` or `auto:N`."""
        if text == "off":
            return None
        kind, _, number = text.partition(":")
        return cls(int(number or AUTO_MOST), auto=True) if kind == "auto" else cls(int(kind))


def tail_pages(positions: int) -> int:
    """The last pages that are always resident: four, or all pages of the last `positions` positions."""
    return max(4, -(-positions // PAGE) + 1 if positions else 0)


def smallest_size(tail: int) -> int:
    """The smallest number of resident positions if the last `tail` pages are always resident.

    It includes the sink, the page that is being filled, and one page that may be swapped out.
    """
    return _round_up((SINK + tail + 2) * PAGE)


def resident_size(wanted: int, tail: int, context: int) -> int | None:
    """The number of resident positions for a request of `wanted`; None if the context is too short to swap pages out.

    The number is at least `wanted`, rounded up to four pages, and smallest_size; at most the context, rounded down.
    """
    size = max(_round_up(wanted), smallest_size(tail))
    if size > context:
        size = context // _STEP * _STEP
    return size if size >= smallest_size(tail) else None


@dataclass(frozen=True)
class DeviceShare:
    """The memory of a device for auto_size."""

    device: str
    #: free bytes after weights and states
    free: int
    #: bytes of one position of a sequence
    position: int

    def positions(self, slots: int) -> int | None:
        """Positions of each of `slots` sequences in half of the free memory; None if a position takes no memory
        here."""
        return max(0, self.free) // 2 // (slots * self.position) if self.position else None


def auto_size(devices: Sequence[DeviceShare], slots: int, most: int = AUTO_MOST) -> int:
    """The most positions of each of `slots` sequences that fit into half of every device's free memory.

    The result is at most `most`.
    """
    return min([most, *(count for share in devices if (count := share.positions(slots)) is not None)])


def describe_shares(devices: Sequence[DeviceShare], slots: int) -> str:
    """The computation of auto_size as a text."""
    return "; ".join(
        f"{share.device}: {share.free} bytes free / 2 / {slots} sequences / {share.position} bytes per token "
        f"= {share.positions(slots)}"
        for share in devices
        if share.position
    )


def _round_up(positions: int) -> int:
    return math.ceil(positions / _STEP) * _STEP
