"""What the layers of a file ask of devices, for predictions: bytes by the functions that loading uses."""

from __future__ import annotations

from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import GGUFFile, TensorInfo
from luce.layers.state import DeltaState
from luce.layers.tensors import expert_tensors, head_name, placed_bytes, shard_tensors, tensor_bytes
from luce.models.spec import Attention, GatedDeltaNet, ModelSpec
from luce.planner.problem import ExpertWork, HeadWork, LayerWork, ModelWork
from luce.runtime.device import Device
from luce.runtime.step import PAGE
from luce.shard.shard_options import ShardOptions
from luce.shard.sizes import activation_bytes, state_bytes

# Launches of a decoding step: of a layer with attention, of one with a recurrent state, of routed experts, of the head.
# Estimates for all families: a family whose layers have more norms has some more.
_ATTENTION, _RECURRENT, _EXPERTS, _HEAD = 11, 13, 4, 3


def model_work(file: GGUFFile, spec: ModelSpec, device: Device, options: ServingOptions) -> ModelWork:
    """The layers of a file with the bytes that they take on `device`; other devices hold multiples of them.

    Layers that read a donor's keys and values have none, and no mirrors are counted. A table of embeddings that is the
    head as well counts at both ends, as on two devices.
    """
    count = len(spec.layers)
    boundaries = (0, *(activation_bytes(spec, layer, options.captured) for layer in range(1, count)))
    layers = tuple(layer_work(file, spec, device, options, layer) for layer in range(count))
    embedding = _outside(file, spec, device, range(1))
    return ModelWork(spec.hidden, boundaries, embedding, head_work(file, spec, device), layers)


def state_expand(spec: ModelSpec, device: Device, counted: Device, options: ServingOptions) -> float:
    """Bytes of keys and values on a device for each byte on the one that `model_work` counts."""
    layers = range(len(spec.layers))
    own, others = (sum(state_bytes(on, spec, layers, options).page) for on in (device, counted))
    return own / others if others else 1.0


def head_work(file: GGUFFile, spec: ModelSpec, device: Device) -> HeadWork:
    """The head of a file on `device`."""
    count, head = len(spec.layers), file.tensors[head_name(spec)]
    return HeadWork(_outside(file, spec, device, range(count - 1, count)), head.rows * head.cols, _HEAD)


def _outside(file: GGUFFile, spec: ModelSpec, device: Device, one: range) -> int:
    """Bytes that a shard of one layer has outside this layer."""
    return tensor_bytes(file, spec, one, device) - tensor_bytes(file, spec, one, device, layers_only=True)


def weight_tensors(file: GGUFFile, spec: ModelSpec) -> list[TensorInfo]:
    """The tensors of all layers."""
    names = shard_tensors(file, spec, range(len(spec.layers)), layers_only=True)
    return [file.tensors[name] for name in sorted(names)]


def layer_work(file: GGUFFile, spec: ModelSpec, device: Device, options: ShardOptions, layer: int) -> LayerWork:
    """One layer of a file on `device`, as in model_work."""
    one, mixer = range(layer, layer + 1), spec.layers[layer].mixer
    tensors = [file.tensors[name] for name in shard_tensors(file, spec, one, layers_only=True)]
    moe = spec.mixture(layer)
    routed = [] if moe is None else [file.tensors[name] for name in expert_tensors(file, layer)]
    experts = None
    if moe is not None and routed:
        macs = sum(tensor.rows * tensor.cols for tensor in routed) // moe.experts
        experts = ExpertWork(placed_bytes(routed, device), macs, moe.experts, moe.used, _EXPERTS)
    dense = sum(tensor.rows * tensor.cols for tensor in tensors if tensor not in routed)
    # Norms, gates and activations read what products have written, and write what products read.
    between = sum(tensor.rows + tensor.cols for tensor in tensors if tensor not in routed)
    if moe is not None and routed:
        between += moe.used * sum(tensor.rows // moe.experts + tensor.cols for tensor in routed)
    size = tensor_bytes(file, spec, one, device, layers_only=True) - (0 if experts is None else experts.bytes)
    state = state_bytes(device, spec, range(0) if spec.donor(layer) is not None else one, options)
    recurrent = isinstance(mixer, GatedDeltaNet)
    return LayerWork(
        bytes=size,
        macs=dense,
        launches=_RECURRENT if recurrent else _ATTENTION,
        kv=sum(state.page) // PAGE,
        attention=2 * mixer.heads * mixer.head_dim if isinstance(mixer, Attention) else 0,
        slot=state.slot,
        # A row reads the whole state, and writes it.
        slot_moved=2 * DeltaState.slot_bytes(mixer) if isinstance(mixer, GatedDeltaNet) else 0,
        activations=4 * between,
        unpacked=dense * (1 if options.prompt_precision == "int8" else 2),
        window=None if isinstance(mixer, GatedDeltaNet) else mixer.window,
        experts=experts,
    )
