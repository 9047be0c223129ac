"""Cards that can be planned with although they are not there: figures of data sheets, and what Luce reaches of them.

Figures are those of the makers' data sheets as they are commonly quoted: memory in GB/s, and TFLOP/s of dense products
of float16 matrices with float32 sums. Of a data sheet's memory rate, steps of a 27B in Q4_K_M have reached 0.55 on an
H200 and 0.64 on an H100 (docs/measurements); of its arithmetic, prompts have reached 0.45 on an H100. The shares below
are assumed of all cards, so predictions say that the card is not there; measured figures count more (`luce doctor
--measure`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from luce.planner.figures import HERE, DeviceFigures, LinkFigures

#: the share of a data sheet's memory rate that products of one row reach
_READ = 0.6
#: by rows, the share of a data sheet's arithmetic that products reach
_ARITHMETIC = {16: 0.06, 512: 0.45, 2048: 0.6}


@dataclass(frozen=True)
class Card:
    """A card by its data sheet."""

    #: bytes per second
    memory: float
    #: operations per second
    arithmetic: float
    vendor: str = "cuda"


# Seconds of a launch, of a step and of the way, and its bytes per second, those of PCIe 4.0 with 16 lanes. A HIP card
# beside one of CUDA is in a daemon, for whose process activations wait; its kernels are launched one by one.
_HOSTING = {"cuda": (3e-6, 5e-5, 1e-5, 2.2e10), "hip": (8e-6, 9e-5, 5e-5, 2.2e10)}

CARDS: Mapping[str, Card] = {
    "3090": Card(936e9, 71e12),
    "4060ti": Card(288e9, 44e12),
    "4090": Card(1008e9, 165e12),
    "5090": Card(1792e9, 209e12),
    "7900xtx": Card(960e9, 123e12, "hip"),
    "a100": Card(2039e9, 312e12),
    "h100": Card(3350e9, 989e12),
    "h200": Card(4800e9, 989e12),
    "mi300x": Card(5300e9, 1307e12, "hip"),
    "strix-halo": Card(256e9, 59e12, "hip"),
}


def card_figures(name: str, free: int, *, bytes_per_weight: float, expand: float) -> DeviceFigures:
    """The figures of a card for weights of so many bytes each.

    `free`: bytes for the model; `expand`: bytes that it holds for each byte that the model counts.
    """
    card = CARDS[name]
    read = _READ * card.memory
    launch, step, latency, bandwidth = _HOSTING[card.vendor]
    # One row reads the weights; several rows are not slower than one.
    one = 2 * read / bytes_per_weight
    rates = {rows: max(one, share * card.arithmetic) for rows, share in _ARITHMETIC.items()}
    way = LinkFigures(latency, bandwidth)
    return DeviceFigures(
        name=name,
        machine=HERE,
        host=False,
        free=free,
        read=read,
        rates=((1, one), *rates.items()),
        launch=launch,
        step=step,
        way=way,
        unpack=read,
        bus=way,
        expand=expand,
    )
