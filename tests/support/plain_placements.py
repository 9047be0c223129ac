"""A model of equal layers and GPUs of one kind, for tests of what the planner makes of them."""

from __future__ import annotations

from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.problem import HeadWork, LayerWork, ModelWork


def gpu(name: str, speed: float = 1.0, free: int = 30_000_000_000) -> DeviceFigures:
    """A GPU with so many bytes free, `speed` times as fast as another one."""
    rates = ((1, 1e12 * speed), (512, 5e13 * speed))
    way = LinkFigures(5e-6, 5e10)
    return DeviceFigures(name, "here", False, free, 8e11 * speed, rates, 4e-6, 5e-5, way)


def model(layers: int = 12) -> ModelWork:
    """A model of so many layers of 1 GB."""
    layer = LayerWork(1_000_000_000, 1_700_000_000, 11, 4096, 10_240)
    return ModelWork(5120, (20_480,) * layers, 0, HeadWork(500_000_000, 800_000_000, 3), (layer,) * layers)
