"""The GGUF files of a repository by quant, and which of them is the default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luce.errors import UsageError
from luce.hub.reporting import size_text

#: beside the weights a model needs memory for keys, values and activations
_LEAST_ROOM = 1 << 30
_ROOM_SHARE = 10

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[0-9A-Z]+)*|TQ\d_\d|B?F16|F32|FP16|FP32|MXFP4(?:_[A-Z]+)*|NVFP4))$", re.IGNORECASE
)
#: projectors of images and statistics of quantisers: no models of their own
_BESIDE_MODELS = re.compile(r"(?:^|/)(?:mmproj|imatrix)|\.imatrix\.gguf$", re.IGNORECASE)
#: the usual compromise of size and quality first; a quant with `UD-` counts as the one without
_DEFAULTS = (
    *("Q4_K_M", "Q4_K_XL", "Q4_K_L", "MXFP4", "MXFP4_MOE", "Q4_K_S", "Q4_K"),
    *("IQ4_NL", "IQ4_XS", "Q4_1", "Q4_0"),
)


@dataclass(frozen=True)
class Variant:
    """One model of a repository: a file, or all parts of a split one."""

    #: as the file spells it, in capitals; empty if its name has no quant
    quant: str
    #: names in the repository, the first part first
    files: tuple[str, ...]
    #: bytes
    size: int

    @property
    def title(self) -> str:
        """What the user calls it."""
        return self.quant or self.files[0]


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a model may take."""

    #: in all
    total: int
    #: names of the devices
    devices: str

    def fits(self, size: int) -> bool:
        """Whether weights of so many bytes leave room for the rest."""
        return size + max(_LEAST_ROOM, self.total // _ROOM_SHARE) <= self.total


def variants(files: Mapping[str, int]) -> list[Variant]:
    """The models among files with these names and sizes, by name. A split model with missing parts is left out."""
    found: dict[str, dict[int, str]] = {}
    parts: dict[str, int] = {}
    for name in sorted(files):
        if not name.lower().endswith(".gguf") or _BESIDE_MODELS.search(name):
            continue
        stem = name[: -len(".gguf")]
        match = _PART.fullmatch(stem)
        stem, number, count = (stem, 1, 1) if match is None else (match[1], int(match[2]), int(match[3]))
        key = f"{stem}/{count}"
        found.setdefault(key, {})[number] = name
        parts[key] = count
    models = []
    for key, names in found.items():
        if sorted(names) == list(range(1, parts[key] + 1)):
            ordered = tuple(names[number] for number in sorted(names))
            models.append(Variant(_quant(key.rpartition("/")[0]), ordered, sum(files[name] for name in ordered)))
    return models


def _quant(stem: str) -> str:
    """The quant in a name without its ending, or in that of its folder."""
    folder, _, name = stem.rpartition("/")
    match = _QUANT.search(name) or _QUANT.search(folder)
    return "" if match is None else match[1].upper()


def named(models: Sequence[Variant], wanted: str) -> list[Variant]:
    """The models that `wanted` names: the name of a file, or a quant in any case, whose `UD-` may be left out."""
    by_file = [model for model in models if wanted in model.files]
    quant = wanted.upper()
    exact = [model for model in models if model.quant == quant]
    return by_file or exact or [model for model in models if model.quant == f"UD-{quant}"]


def by_preference(models: Sequence[Variant]) -> list[Variant]:
    """The models, the usual default first: 4 bits, then more bits, then fewer, the larger ones first."""

    def order(model: Variant) -> tuple[int, float]:
        quant = model.quant.removeprefix("UD-")
        if quant in _DEFAULTS:
            return 0, _DEFAULTS.index(quant)
        digit = re.search(r"\d+", quant)
        bits = 16 if digit is None else int(digit[0])
        if bits == 4:
            return 1, -model.size
        return (2, model.size) if bits > 4 else (3, -model.size)

    return sorted(models, key=order)


def default(name: str, models: Sequence[Variant], memory: DeviceMemory | None) -> tuple[Variant, str]:
    """The default of a repository's models and the reason: the first of `by_preference` that fits the memory; where 4
    bits do not fit, more bits do not either, and fewer may.

    Raises UsageError if none fits.
    """
    ordered = by_preference(models)
    if memory is None:
        return ordered[0], "the usual compromise of size and quality"
    fitting = next((model for model in ordered if memory.fits(model.size)), None)
    if fitting is None:
        smallest = min(models, key=lambda model: model.size)
        raise UsageError(
            f"model {name!r}: the smallest file, {smallest.title}, has {size_text(smallest.size)} and does not fit "
            f"{memory.devices} with {size_text(memory.total)}; name one to take it all the same: {listed(models)}",
            param="model",
        )
    fit = f"fits {memory.devices} with {size_text(memory.total)}"
    first = ordered[0]
    if fitting is first:
        return fitting, fit
    return fitting, f"{fit}; {first.title} with {size_text(first.size)} does not"


def select(name: str, models: Sequence[Variant], wanted: str) -> Variant:
    """The model that `wanted` names. Raises UsageError if there is none, or several."""
    found = named(models, wanted)
    if len(found) == 1:
        return found[0]
    if found:
        files = ", ".join(model.files[0] for model in found)
        raise UsageError(f"model {name!r}: {wanted} is the quant of {files}; name the file behind the colon")
    raise UsageError(f"model {name!r}: the repository has no {wanted}; it has {listed(models)}", param="model")


def listed(models: Sequence[Variant]) -> str:
    """Models with their sizes, the smallest first."""
    return ", ".join(f"{m.title} ({size_text(m.size)})" for m in sorted(models, key=lambda m: m.size))
