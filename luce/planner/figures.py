"""What a device and a link can do: the figures that predictions rest on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: the machine of the server's process
HERE = "here"


@dataclass(frozen=True)
class LinkFigures:
    """How fast bytes get from one place to another."""

    #: seconds, one way
    latency: float
    #: bytes per second
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Seconds that `size` bytes take."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class DeviceFigures:
    """How fast a device computes, and how much memory it has."""

    name: str
    #: the machine; its CPU devices share one memory, and compute the experts that its GPUs leave out
    machine: str
    #: whether it computes in the machine's memory, as a CPU
    host: bool
    #: bytes of free memory
    free: int
    #: bytes of weights per second in a product of one row
    read: float
    #: operations per second of a product by its number of rows, rising; a multiply-add counts as two
    rates: tuple[tuple[int, float], ...]
    #: seconds of a launch
    launch: float
    #: seconds that a step takes beside its kernels
    step: float
    #: between the device and the server's process
    way: LinkFigures
    #: the daemon that the device belongs to; empty: this process
    daemon: str = ""
    #: bytes of arrays of a step
    workspace: int = 0
    #: bytes per second of unpacking weights for products of many rows; None: products read packed weights
    unpack: float | None = None
    #: between a GPU and the memory of its machine; needed where it leaves experts to the CPU
    bus: LinkFigures | None = None
    #: bytes held for each byte of weights in the file
    expand: float = 1.0
    #: bytes held for each byte of keys and values that the model counts
    state_expand: float = 1.0
    #: bytes of keys, values and recurrent states per second; None: as `read`
    state_read: float | None = None
    #: operations per second of a prompt's attention; None: as a product of so many rows
    attention: float | None = None
    #: bytes of a prompt's activations per second between products; None: they take no time
    elementwise: float | None = None
    #: bytes of recurrent states per second that the rows of a prompt read and write; None: they take no time
    recurrence: float | None = None
    #: the same of the rows of a decoding step; None: as `read`
    recurrence_row: float | None = None
    #: seconds of a decoding step's rows in a layer, beside launches and what they read
    layer: float = 0.0
    #: seconds of choosing a layer's experts and adding their results, beside launches
    routing: float = 0.0
    #: bytes that are left to others; None: the problem's share of what is free
    margin: int | None = None
    #: bytes that a load has taken beside what a placement counts
    uncounted: int = 0
    #: by the number of rows, rising, the share of `read` and `rates` that routed experts reach; empty: all of it
    gather: tuple[tuple[int, float], ...] = ()
    #: what servers' decoding steps, and pieces of prompts, have taken of what the other figures say
    decode_ratio: float = 1.0
    prompt_ratio: float = 1.0

    def ratio(self, phase: Literal["decode", "prompt"]) -> float:
        """What servers have taken of the predicted seconds in a phase."""
        return self.decode_ratio if phase == "decode" else self.prompt_ratio
