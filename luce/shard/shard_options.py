"""How a model is loaded and runs, as far as one shard needs to know it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from luce.models.spec import ModelSpec
from luce.ops.kvtype import AUTO, KVTypes
from luce.runtime.device import Array, Device
from luce.runtime.step import Step


@dataclass(frozen=True)
class ShardOptions:
    """Settings that are the same for all shards of a model, and that no model file holds."""

    #: most sequences at a time: each has a slot for its recurrent states
    slots: int = 1
    #: types of keys and values in the pages
    kv: KVTypes = AUTO
    #: most rows of a speculative span or of a draft tree; 0: there are none
    verify_rows: int = 0
    #: layers whose output a drafter reads, ascending
    captured: tuple[int, ...] = ()
    #: whether pages of full attention can be ranked (KVFlash)
    rank_pages: bool = False
    #: whether GPUs copy to each other where the pair allows it; otherwise they copy through pinned host memory
    peer: bool = True

    def ranks(self, spec: ModelSpec, layer: int) -> bool:
        """Whether a layer's queries rank pages."""
        return self.rank_pages and spec.owns_full_pages(layer)


@dataclass(frozen=True)
class DeviceLayers:
    """Consecutive layers of a model for one device."""

    device: Device
    layers: range
    #: bytes of the device in which matrices may be kept unpacked beside the weights
    unpack_bytes: int = 0


#: Called by the last shard with a step and the outputs of the captured layers, uint16 [rows, H] each, while its work on
#: the step is queued: work that is queued on its device from then on finds them complete. A daemon's shard has them on
#: the host.
OnCaptured = Callable[[Step, Sequence[Array]], None]


@dataclass(frozen=True)
class ShardHooks:
    """Functions that a shard of this process calls."""

    #: when a layer has been read
    on_layer: Callable[[], None] = lambda: None
    #: by the last shard, where layers are captured
    on_captured: OnCaptured = lambda step, outputs: None
    #: gives the host memory for the ids, the logits and, if there are any, the keys of the candidates of a step's
    #: output; None: new arrays
    output_memory: Callable[[Step], Sequence[NDArray[Any]] | None] = lambda step: None


NO_HOOKS = ShardHooks()
