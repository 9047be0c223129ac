"""The file of simulated devices that LUCE_SIM_DEVICES names, in JSON:

    {"devices": [{"name": "24 GB card", "free": 25769803776, "read": 8e11, "rates": {"1": 1e12, "512": 1e14},
                  "launch": 2e-6, "step": 4e-5, "way": {"latency": 1e-5, "bandwidth": 2e10}}],
     "links": [{"from": "sim:0", "to": "sim:1", "latency": 1e-5, "bandwidth": 1e11}]}

The first device is `sim:0`, the next one `sim:1`. Sizes are in bytes, times in seconds, rates per second. Figures are
those of all types of weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from luce.config.environment import SIMULATED_DEVICES, environment
from luce.decoders import json_decoder
from luce.errors import UsageError

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
Rows = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class SimulatedWay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast bytes get from one place to another."""

    #: one way
    latency: Seconds
    bandwidth: Rate


class SimulatedLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"before": "from", "behind": "to"}):
    """Copies from one device to another one, which need no memory of the host."""

    before: str
    behind: str
    latency: Seconds
    bandwidth: Rate


class SimulatedFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a device can do; see luce.profiles.profile, whose figures have these names."""

    name: str
    #: bytes of its memory
    free: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
    read: Rate
    rates: Annotated[dict[Rows, Rate], msgspec.Meta(min_length=1)]
    launch: Seconds
    step: Seconds
    #: between the device and pinned memory of the host
    way: SimulatedWay
    unpack: Rate | None = None
    state_read: Rate | None = None
    attention: Rate | None = None
    elementwise: Rate | None = None
    recurrence: Rate | None = None
    gather: dict[Rows, Share] = {}
    #: whether a CPU computes what the device is asked, which takes as long as the CPU takes
    computes: bool = False


class SimulatedMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All simulated devices of this process, and the links between them."""

    devices: Annotated[tuple[SimulatedFigures, ...], msgspec.Meta(min_length=1)]
    links: tuple[SimulatedLink, ...] = ()

    def link(self, before: str, behind: str) -> SimulatedLink | None:
        """The link between two devices; None if their copies pass the host."""
        return next((link for link in self.links if (link.before, link.behind) == (before, behind)), None)


def read_simulated() -> SimulatedMachine:
    """The devices of the file that the environment names. Raises UsageError naming the file and the field."""
    path = environment(SIMULATED_DEVICES)
    if path is None:
        raise UsageError(f"{SIMULATED_DEVICES}: names no file, and there are no simulated devices without one")
    try:
        machine: SimulatedMachine = json_decoder(SimulatedMachine).decode(Path(path).read_bytes())
        _check_links(machine)
    except OSError as error:
        raise UsageError(f"{SIMULATED_DEVICES}: {path}: {error.strerror}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        what, at, field = str(error).partition(" - at ")
        field = field.replace("`", "").replace("$.", "")
        raise UsageError(f"{SIMULATED_DEVICES}: {path}: {field}{': ' if at else ''}{what}") from None
    return machine


def _check_links(machine: SimulatedMachine) -> None:
    names = [f"sim:{index}" for index in range(len(machine.devices))]
    pairs = [(link.before, link.behind) for link in machine.links]
    for index, (before, behind) in enumerate(pairs):
        for field, name in (("from", before), ("to", behind)):
            if name not in names:
                raise ValueError(f"{name} is none of {', '.join(names)} - at `$.links[{index}].{field}`")
        if before == behind:
            raise ValueError(f"{behind} is where the link comes from - at `$.links[{index}].to`")
        if pairs.index((before, behind)) < index:
            raise ValueError(f"a second link from {before} to {behind} - at `$.links[{index}]`")
