"""Devices of `luce plan --what-if`, which are not there: like one that is, or a card by its data sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from luce.backend.measured_devices import ModelOnDevices
from luce.backend.model_work import state_expand, weight_tensors
from luce.config.values import mebibytes
from luce.errors import UsageError
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.known_cards import CARDS, card_figures
from luce.planner.problem import Problem
from luce.runtime.device import DeviceName
from luce.runtime.host import HostDevice


class StandIn(HostDevice):
    """Stands for a card that is not there: weights are packed, keys and values have 16 bits."""

    host, packed = False, True
    kv_dtype = np.dtype(np.float16)

    def __init__(self) -> None:
        super().__init__()
        self.name = DeviceName("cuda", 0)


def with_devices(problem: Problem, texts: Sequence[str], card: Callable[[str, int], DeviceFigures]) -> Problem:
    """The problem with further devices, each `LIKE@FREE`: like one of the problem's, or a known card, with so much free
    memory; or `LIKE@FREE,LATENCY,BANDWIDTH`: on another machine, behind a link of so many seconds and bytes per second.
    `card`: the figures of a known card with so many free bytes.

    Raises UsageError naming --what-if, and the devices and cards that can be named.
    """
    devices = {device.name: device for device in problem.devices}
    added = []
    for number, text in enumerate(texts, 1):
        name, at, rest = text.partition("@")
        size, *link = rest.split(",")
        if name not in devices and name not in CARDS:
            known = ", ".join([*devices, *CARDS])
            raise UsageError(f"--what-if {text}: expected DEVICE@FREE with one of {known}", param="what_if")
        try:
            free = mebibytes(size) << 20
            latency, bandwidth = map(float, link) if link else (0.0, 1.0)
            if not at or latency < 0 or not bandwidth > 0:
                raise ValueError
        except ValueError:
            form = "DEVICE@FREE[,LATENCY,BANDWIDTH], such as cuda:0@24GiB,0.0005,117e6"
            raise UsageError(f"--what-if {text}: expected {form}", param="what_if") from None
        own = replace(devices[name], free=free) if name in devices else card(name, free)
        own = replace(own, name=f"{name}+{number}", daemon="")
        if link:
            own = replace(own, machine=own.name, way=LinkFigures(latency, bandwidth))
        added.append(own)
    return replace(problem, devices=(*problem.devices, *added))


def card_for(model: ModelOnDevices, problem: Problem) -> Callable[[str, int], DeviceFigures]:
    """The figures of known cards for a model."""
    tensors = weight_tensors(model.file, model.spec)
    # GPUs hold the weights as the file has them.
    size = sum(tensor.nbytes for tensor in tensors)
    counted = sum(layer.bytes + (0 if layer.experts is None else layer.experts.bytes) for layer in problem.model.layers)
    weights = sum(tensor.rows * tensor.cols for tensor in tensors)

    def figures(name: str, free: int) -> DeviceFigures:
        card = card_figures(name, free, bytes_per_weight=size / weights, expand=size / counted)
        return replace(card, state_expand=state_expand(model.spec, StandIn(), model.devices[0], model.options))

    return figures
