"""The routed experts of a layer: on the layer's device, or on a CPU to which only rows travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luce.gguf.reader import GGUFFile
from luce.layers.tensors import tensor_name
from luce.layers.weights import WeightLoader
from luce.models.spec import MoE
from luce.ops import moe_prefill_int8
from luce.ops.int8_rows import Int8Rows, to_int8
from luce.ops.moe import Routing, combine, expert_matmul, gated_experts, group_tiles
from luce.ops.weight import Weight
from luce.runtime.device import Array, Device


@dataclass(frozen=True)
class ExpertOffload:
    """Layers of another device whose routed experts lie on a CPU."""

    device: Device
    layers: frozenset[int]


class RoutedExperts:
    """The routed experts on `device`; `gate_up` stacks their gates and ups."""

    def __init__(self, device: Device, spec: MoE, *, gate_up: Weight, down: Weight) -> None:
        self.device = device
        self.gate_up = gate_up
        self.down = down
        self._spec = spec

    def multiplies_int8(self, rows: int) -> bool:
        """Whether `results` of so many rows takes them as int8, and groups them itself."""
        spec = self._spec
        return moe_prefill_int8.multiplies_int8(
            self.device, rows, self.gate_up, self.down, spec.experts, spec.activation
        )

    def results(self, y: Array | Int8Rows, routing: Routing) -> Array:
        """What each chosen expert makes of its row, one operation after another: y float32 [rows, hidden], or int8
        where `multiplies_int8` says so -> float32, or of int8 bfloat16 (uint16), [rows, used, hidden], for `combine`.
        """
        device, spec, rows = self.device, self._spec, y.shape[0]
        if isinstance(y, Int8Rows):
            groups = group_tiles(device, routing.ids, spec.experts, moe_prefill_int8.TILE_ROWS)
            gated = moe_prefill_int8.multiply_gated(device, y, self.gate_up, spec.experts, groups, spec.activation)
            made = moe_prefill_int8.multiply(device, to_int8(device, gated), self.down, spec.experts, groups)
            return made.reshape(rows, spec.used, -1)
        inner = gated_experts(device, y, self.gate_up, spec.experts, routing, spec.activation)
        return expert_matmul(device, inner.reshape(rows, spec.used, spec.hidden), self.down, spec.experts, routing)


def load_experts(
    file: GGUFFile, weights: WeightLoader, device: Device, layer: int, spec: MoE, hidden: int
) -> RoutedExperts:
    """The experts of a layer by the loader of `device`; `hidden`: columns of the residual stream."""
    # Some converters write gate and up as one tensor, gate rows first.
    parts = {"ffn_gate_up_exps": 2 * spec.hidden}
    if tensor_name(layer, "ffn_gate_up_exps") not in file.tensors:
        parts = {"ffn_gate_exps": spec.hidden, "ffn_up_exps": spec.hidden}

    def stacked(parts: Mapping[str, int], cols: int, *, gated: bool) -> Weight:
        names, own = [tensor_name(layer, part) for part in parts], [f"blk.{layer}.{part}.bias" for part in parts]
        return weights.experts(
            names, cols, [*parts.values()], spec.experts, own if spec.biases else (), routed_in=layer, gated=gated
        )

    gate_up = stacked(parts, hidden, gated=True)
    return RoutedExperts(
        device, spec, gate_up=gate_up, down=stacked({"ffn_down_exps": hidden}, spec.hidden, gated=False)
    )


class HostRows:
    """Pinned memory in which rows lie on their way between a device and the CPU; one for all layers of a shard.

    The copies of a layer are over before those of the next one begin, as the device's queue orders them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: list[NDArray[np.uint8]] = []

    def like(self, place: int, array: Array) -> NDArray[np.generic]:
        """Memory of an array's shape and dtype. `place`: 0, 1, ..., for arrays that are in use together."""
        while len(self._memory) <= place:
            self._memory.append(self._device.pinned(1))
        if self._memory[place].nbytes < array.nbytes:
            self._memory[place] = self._device.pinned(array.nbytes)
        memory: NDArray[np.generic] = self._memory[place][: array.nbytes].view(array.dtype).reshape(array.shape)
        return memory


class OffloadedExperts:
    """Experts on a CPU, for a layer on `device`: rows, ids and weights go there, the weighted sums come back."""

    def __init__(self, device: Device, experts: RoutedExperts, rows: HostRows) -> None:
        #: where the experts lie
        self.device = experts.device
        self._device = device
        self._experts = experts
        self._rows = rows

    def begin(self, y: Array, routing: Routing) -> Callable[[], Array]:
        """Queue the copies of y float32 [rows, hidden] and its routing to the host.

        The returned function computes there and returns the sums on the device, float32 [rows, hidden]. Work that is
        queued before it is called runs at the same time. In a capture both happen at each launch of the graph.
        """
        device, waits = self._device, list[Callable[[], NDArray[np.generic]]]()

        def send(*arrays: Array) -> None:
            waits[:] = (device.fetch(array, self._rows.like(i, array)) for i, array in enumerate(arrays))

        def compute(out: Array) -> None:
            rows, ids, weights = (wait() for wait in waits)
            sums = self._rows.like(len(waits), out)
            results = self._experts.results(rows, Routing(ids, weights, None))
            sums[...] = combine(self._experts.device, results, weights)
            device.write(out, sums)

        def finish() -> Array:
            device.call_host(compute, out)
            return out

        out = device.empty(y.shape)
        device.call_host(send, y, routing.ids, routing.weights)
        return finish
