"""The input of predictions and of the search: a model's layers, the load, the devices and the links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from luce.planner.figures import DeviceFigures, LinkFigures

#: what is to be fast: decoding, prompts, or a prompt with its reply
Objective = Literal["decode", "prompt", "balanced"]
#: which layers of GPUs leave their experts to the CPU: none, the fewest with which a shard fits, the last N of all; or
#: as many as a placement to predict says
Offload = Literal["off", "auto", "given"] | int

# Most prompt rows in a piece by the number of shards. A pipeline needs several pieces to work on at the same time, and
# a CPU needs no long ones.
_ONE_SHARD_ROWS, _TWO_SHARDS_ROWS, _LEAST_ROWS = 2048, 1024, 512


@dataclass(frozen=True)
class ExpertWork:
    """The routed experts of a layer."""

    #: of all of them in the file
    bytes: int
    #: multiply-adds of a row with one of them
    macs: int
    count: int
    #: experts that a row chooses
    used: int
    launches: int


@dataclass(frozen=True)
class LayerWork:
    """What a layer takes in memory, and what it has to compute."""

    #: of its weights in the file, without routed experts
    bytes: int
    #: multiply-adds of a row with these weights
    macs: int
    launches: int
    #: bytes of keys and values per position
    kv: int
    #: multiply-adds of a row and a position in attention
    attention: int
    #: bytes of recurrent state per sequence
    slot: int = 0
    #: bytes of recurrent state that a row reads and writes
    slot_moved: int = 0
    #: bytes of a row that are read and written between products
    activations: int = 0
    #: bytes of its weights in unpacked form
    unpacked: int = 0
    #: positions that a row sees; None: all
    window: int | None = None
    experts: ExpertWork | None = None


@dataclass(frozen=True)
class HeadWork:
    """The product that turns hidden states into logits."""

    bytes: int
    macs: int
    launches: int


@dataclass(frozen=True)
class ModelWork:
    """A model as its layers."""

    hidden: int
    #: bytes per token of the activation that enters a layer, for each layer
    boundaries: tuple[int, ...]
    #: bytes of the table of embeddings
    embedding: int
    head: HeadWork
    layers: tuple[LayerWork, ...]


@dataclass(frozen=True)
class Load:
    """What the model is to do."""

    #: sequences whose states are kept
    sequences: int
    #: positions of a sequence that are kept
    context: int
    #: tokens of a prompt
    prompt: int
    #: tokens of a reply
    reply: int = 256
    #: rows of a decoding step
    rows: int = 1
    #: position of these rows; None: behind the prompt
    depth: int | None = None
    #: most prompt rows in a step
    chunk: int = 2048


@dataclass(frozen=True)
class Drafting:
    """Drafts in each decoding step, whose rows are the verified ones (`Load.rows`)."""

    #: that a step is expected to bring; 1 until a server has measured it
    tokens: float = 1.0
    #: seconds of a step's proposals; None: not known, and not counted
    seconds: float | None = 0.0
    measured: bool = False
    #: of the drafter; empty where it computes nothing on a device
    device: str = ""
    #: bytes that it takes there
    bytes: int = 0


@dataclass(frozen=True)
class Problem:
    """A model, its load, and the devices that may hold its layers."""

    model: ModelWork
    load: Load
    devices: tuple[DeviceFigures, ...]
    #: links of devices that reach each other, by their names in the direction of the layers; others go by the server
    links: Mapping[tuple[str, str], LinkFigures]
    objective: Objective = "balanced"
    offload: Offload = "off"
    #: a placement with more shards must be faster by this share
    margin: float = 0.03
    #: share of free memory that stays free
    reserve: float = 0.06
    #: whether all devices hold layers, in their order
    pinned: bool = False
    #: a device that must hold layers; empty: none must
    required: str = ""
    #: CPUs that hold no layers, but may get experts, of machines without a CPU among the devices
    expert_cpus: tuple[DeviceFigures, ...] = ()
    #: None: a step gives a token for each of its rows
    drafting: Drafting | None = None

    @property
    def weights(self) -> tuple[float, float]:
        """How much a second of a decoding step and a second of reading a prompt count. Of drafted steps a reply takes
        fewer."""
        steps = 1.0 if self.drafting is None else 1 / self.drafting.tokens
        reply = self.load.reply * steps
        return {"decode": (steps, 0.0), "prompt": (0.0, 1.0), "balanced": (reply, 1.0)}[self.objective]

    @property
    def step_tokens(self) -> float:
        """Tokens that a decoding step gives."""
        return self.load.rows if self.drafting is None else self.drafting.tokens

    @property
    def drafting_seconds(self) -> float:
        """Seconds of a decoding step's proposals."""
        return 0.0 if self.drafting is None else self.drafting.seconds or 0.0

    def room(self, device: DeviceFigures) -> float:
        """Bytes of a device that layers may take."""
        margin = device.free * self.reserve if device.margin is None else device.margin
        return max(0.0, device.free - margin - device.uncounted)

    @cached_property
    def pools(self) -> Mapping[str, float]:
        """Bytes that layers and experts may take in the memory of each machine that has a CPU device."""
        pools = {cpu.machine: self.room(cpu) for cpu in self.expert_cpus}
        for device in self.devices:
            if device.host:
                pools[device.machine] = pools.get(device.machine, 0.0) + self.room(device)
        return pools

    def expert_cpu(self, device: DeviceFigures) -> DeviceFigures | None:
        """The CPU that computes the experts that a device leaves out; None if it cannot leave any."""
        if device.host or device.bus is None or self.offload == "off":
            return None
        return next(
            (cpu for cpu in (*self.devices, *self.expert_cpus) if cpu.host and cpu.machine == device.machine), None
        )

    def link_seconds(self, before: DeviceFigures, behind: DeviceFigures, size: float) -> float:
        """Seconds that `size` bytes take from one device to the next one: directly, or by way of the server."""
        link = self.links.get((before.name, behind.name))
        if link is not None:
            return link.seconds(size)
        return before.way.seconds(size) + behind.way.seconds(size)

    def piece_rows(self, shards: int, *, with_cpu: bool) -> int:
        """Prompt rows in a piece of a pipeline of so many shards."""
        rows = _ONE_SHARD_ROWS if shards == 1 else _TWO_SHARDS_ROWS if shards == 2 else _LEAST_ROWS
        return min(_LEAST_ROWS if with_cpu else rows, self.load.prompt)

    def pieces(self, rows: int) -> int:
        """Pieces of a prompt."""
        return math.ceil(self.load.prompt / rows)
