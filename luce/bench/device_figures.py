"""Figures of devices for a model: profiles of its types of weights, in proportion to their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from luce.bench.profile import DeviceProfile
from luce.gguf.reader import TensorInfo
from luce.ops.weight import KERNEL_TYPES
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.runtime.device import Device

# Types with a smaller share of the bytes take the figures of the type with the nearest number of bits.
_LEAST_SHARE = 0.05
#: the machine of the devices of this process
_HERE = "here"


def weight_types(tensors: Sequence[TensorInfo]) -> dict[GGMLQuantizationType, int]:
    """The bytes of each type of weights that is worth measuring, those of rarer types included: as the nearest one."""
    sizes: dict[GGMLQuantizationType, int] = {}
    for tensor in tensors:
        type = tensor.type if tensor.type in KERNEL_TYPES else GGMLQuantizationType.F16
        sizes[type] = sizes.get(type, 0) + tensor.nbytes
    total = sum(sizes.values())
    kept = {type: size for type, size in sizes.items() if size >= _LEAST_SHARE * total}
    for type, size in sizes.items():
        if type not in kept:
            kept[min(kept, key=lambda other: abs(_bits(other) - _bits(type)))] += size
    return kept


def _bits(type: GGMLQuantizationType) -> float:
    elements, size = GGML_QUANT_SIZES[type]
    return 8.0 * int(size) / int(elements)


def device_figures(
    device: Device,
    profile: DeviceProfile,
    sizes: Mapping[GGMLQuantizationType, int],
    *,
    free: int,
    expand: float,
) -> DeviceFigures:
    """The figures of a device of this process for a model with so many bytes of each type.

    `free`: bytes for the model; `expand`: bytes that the device holds for each byte that the model counts.
    """
    found = {type: profile.formats[type.name] for type in sizes}
    elements = {type: size / _bits(type) for type, size in sizes.items()}
    read = _harmonic({type: found[type].read for type in sizes}, sizes)
    rows = sorted(set.intersection(*(set(figures.rates) for figures in found.values())))
    rates = tuple((count, _harmonic({type: found[type].rates[count] for type in sizes}, elements)) for count in rows)
    unpacked = {type: figures.unpack for type, figures in found.items() if figures.unpack is not None}
    way = LinkFigures(profile.latency, profile.bandwidth)
    return DeviceFigures(
        name=str(device.name),
        machine=_HERE,
        host=device.host,
        free=free,
        read=read,
        rates=rates,
        launch=profile.launch,
        step=profile.step,
        way=way,
        unpack=_harmonic(unpacked, elements) if unpacked else None,
        bus=None if device.host else way,
        expand=expand,
    )


def _harmonic(values: Mapping[GGMLQuantizationType, float], weights: Mapping[GGMLQuantizationType, float]) -> float:
    """The mean rate of work that has so much of each type."""
    return sum(weights[type] for type in values) / sum(weights[type] / value for type, value in values.items())
