"""Options of a shard, and the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from luce.layers.routed_experts import ExpertOffload
from luce.layers.weight_pool import WeightPool
from luce.models.spec import ModelSpec
from luce.ops.kvtype import AUTO, KVTypes
from luce.runtime.device import Array, Device
from luce.runtime.step import Step


@dataclass(frozen=True)
class ShardOptions:
    """Settings that are the same for all shards of a model and do not come from its file."""

    #: most sequences at a time; each has a slot for its recurrent states
    slots: int = 1
    #: types of keys and values in the pages
    kv: KVTypes = AUTO
    #: most rows of a speculative span or of a draft tree; 0: neither is possible
    verify_rows: int = 0
    #: layers whose output a drafter reads, ascending
    captured: tuple[int, ...] = ()
    #: whether pages of full attention can be ranked (KVFlash)
    rank_pages: bool = False
    #: whether two GPUs copy to each other directly, if they can; otherwise they copy through pinned host memory
    peer: bool = True
    #: --prompt-precision: in what products of many rows multiply, fp16 or int8
    prompt_precision: str = "fp16"

    def ranks(self, spec: ModelSpec, layer: int) -> bool:
        """Whether a layer's queries rank pages."""
        return self.rank_pages and spec.owns_full_pages(layer)


@dataclass(frozen=True)
class DeviceLayers:
    """Consecutive layers of a model for one device."""

    device: Device
    layers: range
    #: most bytes of the device for unpacked copies of matrices
    unpack_bytes: int = 0
    #: where routed experts of some of the layers lie; None: with their layers
    offload: ExpertOffload | None = None
    #: shares their weights with other models of the same file; None: they are this model's own
    pool: WeightPool | None = None
    #: bytes of the layers' weights and states on the device, as planned; 0: not planned
    planned_bytes: int = 0

    @property
    def offloaded(self) -> tuple[int, ...]:
        """These layers, ascending."""
        return () if self.offload is None else tuple(sorted(self.offload.layers))


#: Gets a step and the outputs of the captured layers, uint16 [rows, H] each. The last shard calls it when the work on
#: the step is queued; work that is queued on its device later finds the outputs complete. The outputs of a daemon's
#: shard are on the host.
OnCaptured = Callable[[Step, Sequence[Array]], None]


@dataclass(frozen=True)
class ShardHooks:
    """Functions that a shard of this process calls."""

    #: called after each layer that was read
    on_layer: Callable[[], None] = lambda: None
    #: called by the last shard, if layers are captured
    on_captured: OnCaptured = lambda step, outputs: None
    #: returns host memory for the output of a step: ids, logits and, if there are any, the keys of candidates and what
    #: is drawn; None: new arrays
    output_memory: Callable[[Step], Sequence[NDArray[Any]] | None] = lambda step: None


NO_HOOKS = ShardHooks()
