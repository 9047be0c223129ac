"""Figures of devices for a model: profiles of its types of weights, in proportion to their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from luce.gguf.reader import TensorInfo
from luce.ops.weight import KERNEL_TYPES
from luce.planner.figures import HERE, DeviceFigures, LinkFigures
from luce.profiles.profile import DeviceProfile, LinkProfile, Observed
from luce.remote.device import MEMBER, is_remote
from luce.runtime.device import Device

# Types with a smaller share of the bytes take the figures of the type with the nearest number of bits.
_LEAST_SHARE = 0.05
#: least and most that servers' own times change predictions by
_CORRECTIONS = 0.5, 2.0


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


def nearest_types(
    tensors: Sequence[TensorInfo], known: Iterable[GGMLQuantizationType]
) -> dict[GGMLQuantizationType, int]:
    """The bytes of tensors, each type as the one of `known` with the nearest number of bits."""
    known, sizes = list(known), dict[GGMLQuantizationType, int]()
    for type, size in weight_types(tensors).items():
        nearest = min(known, key=lambda other: abs(_bits(other) - _bits(type)))
        sizes[nearest] = sizes.get(nearest, 0) + size
    return sizes


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
    way: LinkProfile | None = None,
    int8: bool = False,
) -> DeviceFigures:
    """The figures of a device for a model with so many bytes of each type.

    `free`: bytes for the model; `expand`: bytes that the device holds for each byte that the model counts; `way`:
    between the device and this process, the profile's by default. `int8`: many rows are multiplied in int8, where the
    device has figures of that. What servers observed of prompts was in fp16, and does not correct these.
    """
    int8 = int8 and has_int8(profile)
    found = {type: profile.formats[type.name] for type in sizes}
    if int8:
        found = {type: replace(own, rates=own.rates | own.int8) for type, own in found.items()}
    elements = {type: size / _bits(type) for type, size in sizes.items()}
    rates = tuple(
        (rows, _harmonic({type: found[type].rates[rows] for type in sizes}, elements))
        for rows in _common(figures.rates for figures in found.values())
    )
    gather = tuple(
        (rows, _harmonic({type: found[type].gather[rows] for type in sizes}, sizes))
        for rows in _common(figures.gather for figures in found.values())
    )
    unpacking = {type: own.int8_unpack if int8 and own.int8 else own.unpack for type, own in found.items()}
    unpacked = {type: rate for type, rate in unpacking.items() if rate is not None}
    own = LinkFigures(profile.way.latency, profile.way.bandwidth)
    return DeviceFigures(
        name=str(device.name),
        machine=machine(device),
        host=device.host,
        free=free,
        read=_harmonic({type: found[type].read for type in sizes}, sizes),
        rates=rates,
        launch=profile.launch,
        step=profile.step,
        way=own if way is None else LinkFigures(way.latency, way.bandwidth),
        daemon=device.daemon.name if is_remote(device) else "",
        unpack=_harmonic(unpacked, elements) if unpacked else None,
        bus=None if device.host else own,
        expand=expand,
        state_read=profile.state_read,
        attention=profile.attention,
        elementwise=profile.elementwise,
        recurrence=profile.recurrence,
        recurrence_row=profile.recurrence_row,
        layer=sum(size * found[type].layer for type, size in sizes.items()) / sum(sizes.values()),
        gather=gather,
        routing=profile.routing,
        decode_ratio=_correction(profile.observed.get("decode")),
        prompt_ratio=1.0 if int8 else _correction(profile.observed.get("prompt")),
    )


def has_int8(profile: DeviceProfile) -> bool:
    """Whether a device has figures of products in int8."""
    return any(figures.int8 for figures in profile.formats.values())


def machine(device: Device) -> str:
    """The machine of a device, whose CPU devices share one memory."""
    place = device.name.place
    if place.startswith(MEMBER):
        return place
    host, _, _ = place.removeprefix("tcp://").rpartition(":")
    return host or HERE


def _correction(observed: Observed | None) -> float:
    """The ratio by which predictions of a device are corrected, as servers observed it, within limits."""
    low, high = _CORRECTIONS
    return 1.0 if observed is None else min(high, max(low, observed.ratio))


def _common(tables: Iterable[Mapping[int, float]]) -> list[int]:
    """The numbers of rows that all tables have, rising."""
    return sorted(set.intersection(*map(set, tables)))


def _harmonic(values: Mapping[GGMLQuantizationType, float], weights: Mapping[GGMLQuantizationType, float]) -> float:
    """The mean rate of work that has so much of each type."""
    return sum(weights[type] for type in values) / sum(weights[type] / value for type, value in values.items())
