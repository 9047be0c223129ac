"""Which layers' routed experts lie on the CPU (--experts-on), and how many bytes they take there. Reads no weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from luce.config.settings import Config
from luce.errors import UsageError
from luce.gguf.reader import GGUFFile
from luce.layers.tensors import expert_tensors, placed_bytes
from luce.models.spec import ModelSpec
from luce.runtime.device import Device
from luce.runtime.open import open_expert_cpu

_PARAM = "experts_on"


@dataclass(frozen=True)
class ExpertRequest:
    """The layers whose routed experts lie on a CPU."""

    #: a CPU device of this process; a daemon opens one of its own
    device: Device
    #: layers whose experts lie there in any case
    layers: frozenset[int] = frozenset()
    #: whether further layers of GPUs leave their experts to it, the fewest with which a device holds its layers
    auto: bool = False

    @classmethod
    def of(cls, config: Config, spec: ModelSpec, devices: Sequence[Device]) -> ExpertRequest | None:
        """The request of --experts-on for a model on `devices`; None if all experts lie with their layers. Raises
        UsageError if the model lacks such layers."""
        if config.experts_on == "device":
            return None
        layers = requested_layers(config.experts_on, spec)
        device = open_expert_cpu(devices, config.cpu_weights)
        margins = dict(config.device_margin)
        device.margin = margins.get(str(device.name), margins.get(""))
        return cls(device, layers, auto=config.experts_on == "auto")


def requested_layers(text: str, spec: ModelSpec) -> frozenset[int]:
    """The layers that a value of --experts-on names: `cpu`, a number of layers, or ranges; none for `auto`.

    Raises UsageError if the model has no experts, or not in so many or in these layers.
    """
    present = [layer for layer in range(len(spec.layers)) if spec.mixture(layer) is not None]
    if not present:
        raise UsageError(f"--experts-on {text}: the model has no experts", param=_PARAM)
    if text in ("cpu", "auto"):
        return frozenset(present if text == "cpu" else ())
    if "-" not in text:
        count = int(text)
        if count > len(present):
            raise UsageError(f"--experts-on {text}: {len(present)} layers have experts", param=_PARAM)
        return frozenset(present[len(present) - count :])
    named = {layer for first, last in re.findall(r"(\d+)-(\d+)", text) for layer in range(int(first), int(last) + 1)}
    if not named & {*present} or max(named) >= len(spec.layers):
        listed = f"layers {present[0]}..{present[-1]} of {len(spec.layers)} have experts"
        raise UsageError(f"--experts-on {text}: {listed}", param=_PARAM)
    return frozenset(named & {*present})


class ExpertBytes:
    """Bytes of routed experts, by where they lie. Without a request all lie with their layers."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, request: ExpertRequest | None) -> None:
        self._request = request
        self._tensors = cache(
            lambda layer: [file.tensors[name] for name in expert_tensors(file, layer)] if spec.mixture(layer) else []
        )

    def placed(self, layers: Sequence[int], device: Device) -> int:
        """Bytes of the experts of some layers on a device."""
        return sum(placed_bytes(self._tensors(layer), device) for layer in layers)

    def on_cpu(self, layers: Sequence[int]) -> int:
        """Bytes of the experts of some layers on the CPU of the request."""
        return 0 if self._request is None else self.placed(layers, self._request.device)

    def fixed(self, layers: range) -> tuple[int, ...]:
        """The layers of a range whose experts lie on the CPU in any case."""
        return () if self._request is None else tuple(layer for layer in layers if layer in self._request.layers)

    def movable(self, device: Device, layer: int) -> int:
        """Bytes that the device has less if the layer's experts go to the CPU because they do not fit; 0 if they may
        not."""
        if self._request is None or not self._request.auto or device.host or layer in self._request.layers:
            return 0
        return self.placed([layer], device)

    def away(self, device: Device, layers: range, excess: int) -> tuple[int, ...]:
        """The layers of a device whose experts lie on the CPU: the fixed ones, and from the last layer backwards as few
        as rid the device of `excess` bytes, or all."""
        found = list(self.fixed(layers))
        for layer in reversed(layers):
            if excess <= 0:
                break
            if size := self.movable(device, layer):
                found.append(layer)
                excess -= size
        return tuple(sorted(found))
