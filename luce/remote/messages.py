"""The messages about layers in a daemon. The server sends requests; the daemon responds to each, in order.

    Measure        -> Measured measure the devices; before Load
    Probe          -> Probed   bytes there and back, which measure the link; before Load
    Load           -> Loaded   load layers of a file
    Announce                   no response: the step of the next Forward, while its input is still being computed
    Forward        -> Done     run the announced step; its input is ready
    Embed          -> Tensors  rows of the token table
    Project        -> Done     the head's product with rows
    Accept         -> Done     commit draft rows
    UpdateRanking  -> Done     add pages to the page ranking of a slot, or drop the slot from it
    RankPages      -> Tensors  attention shares of ranked pages
    Save           -> Saved    save a sequence's state in the daemon, under a number
    Fetch          -> Tensors  tensors of a saved state
    Restore        -> Done     copy a saved state back into a slot and pages
    Drop                       no response: release saved states
    Observe                    no response: keep how a device compares with its prediction
    LoadState      -> Done     copy tensors of this message into a slot and pages

Every request may have the response Failed instead. A Step and an Output travel field by field as they are declared, so
a new field needs no new message. luce.ipc.lifecycle has the messages that come before these, and the heartbeat;
luce.draft.messages has those of drafters, luce.compress.messages those of scorers.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.ipc.lifecycle import Failed, Hello, Open
from luce.profiles.profile import DeviceProfile, LinkProfile, Observed, Phase
from luce.remote.mask_codec import WireMasks
from luce.runtime.step import Output, Step


class Measure(msgspec.Struct, tag=True):
    """Measure the daemon's devices, before anything is loaded."""

    #: types of weights, such as Q4_K
    types: tuple[str, ...]
    #: whether products with routed experts are measured
    experts: bool
    #: whether gated DeltaNet is measured
    recurrent: bool
    #: for devices without stored figures; 0: none is measured
    seconds: float
    #: measure devices with stored figures too
    anew: bool = False
    #: whether products of many rows in int8 are measured, where a device has them
    int8: bool = False


class PeerFigures(msgspec.Struct):
    """The link from one of the daemon's devices to another one that it reaches, by their numbers."""

    before: int
    behind: int
    link: LinkProfile


class MeasuredDevice(msgspec.Struct):
    """The figures of a device."""

    #: identifies the device as it is, with its driver (luce.profiles.profile_cache.profile_key)
    key: str
    #: None: it has none
    profile: DeviceProfile | None
    #: why it has none, where that is an error
    error: str = ""


class Measured(msgspec.Struct, tag=True):
    """The response to Measure."""

    devices: tuple[MeasuredDevice, ...]
    peers: tuple[PeerFigures, ...]


class Probe(msgspec.Struct, tag=True):
    """Bytes that take the way of an activation in a message, before anything is loaded."""

    checksummed: ClassVar[bool] = False

    data: NDArray[np.uint8]
    #: bytes of the response
    answer: int


class Probed(msgspec.Struct, tag=True):
    """The response to Probe."""

    checksummed: ClassVar[bool] = False

    data: NDArray[np.uint8]


class Load(msgspec.Struct, tag=True):
    """Load consecutive layers of a file, a range for each of the devices that get some."""

    path: str
    #: fingerprint of the file as the server sees it
    fingerprint: str
    #: [begin, end) for each device
    layers: tuple[tuple[int, int], ...]
    #: pages of each page group
    pages: tuple[int, ...]
    slots: int
    #: KV types of keys and of values
    kv: tuple[str, str]
    #: most rows of a speculative span or of a draft tree
    verify_rows: int
    #: layers whose outputs go to the drafter; the last shard sends them too
    captured: tuple[int, ...]
    #: whether pages can be ranked
    rank_pages: bool
    #: bytes of each device that unpacked matrices may take
    unpack_bytes: tuple[int, ...]
    #: most rows of a Forward
    rows: int
    #: whether devices may copy to each other directly
    peer: bool
    #: bytes of the arena
    arena: int
    #: whether the arena is shared memory, whose descriptor follows; otherwise activations travel in messages
    shared: bool
    #: the type of activations in messages: one of luce.remote.activation_codec.TYPES
    activations: str = "f32"
    #: in what products of many rows multiply, fp16 or int8
    prompt_precision: str = "fp16"
    #: of each device, layers whose routed experts lie on the CPU of its machine, ascending; empty: of no device
    offloaded: tuple[tuple[int, ...], ...] = ()
    #: whether these experts stay in their file's types
    offloaded_packed: bool = True
    #: positions that the server's spec is for (luce.models.spec.ModelSpec.for_context)
    context: int = 0
    #: the numbers of the devices in the order of `layers`; empty: all of them as they are
    devices: tuple[int, ...] = ()


class LoadedLayers(msgspec.Struct):
    """The layers on one device, in bytes."""

    device: str
    #: [begin, end)
    layers: tuple[int, int]
    weights: int
    state: int
    #: matrices as float16, beside the packed weights
    unpacked: int
    #: experts on the CPU of the device's machine
    offloaded: int = 0
    #: most rows of a step of replies in which a row has the bits that it has alone
    invariant_rows: int = 0
    #: whether prompts of 17 to 143 rows each may share a step, with the bits that each has alone
    shares_prompts: bool = False


class Loaded(msgspec.Struct, tag=True):
    """The response to Load."""

    #: one for each device
    parts: tuple[LoadedLayers, ...]
    #: columns of each input array, and of each output array, of the shard
    input_widths: tuple[int, ...]
    output_widths: tuple[int, ...]
    vocab: int
    #: whether the devices wait for the arena's input flag, and raise its output flag, without the host
    flags: bool


class Announce(msgspec.Struct, tag=True):
    """The step that the next Forward runs, and the places of its input and output in the arena (-1 for none)."""

    step: Step
    source: int
    target: int
    #: The value of the arena's input flag when the input is ready, so that a GPU can wait for it; None if only Forward
    #: says so. The server raises the flag before it sends any other request.
    input_flag: int | None = None
    #: where the Output goes if there is an output flag, as luce.remote.shared_layout.OutputLayout
    output: int = -1
    #: the value of the arena's output flag when the Output, and what was captured, are ready; None if Done has the
    #: Output
    output_flag: int | None = None


class Forward(msgspec.Struct, tag=True):
    """Run the announced step."""

    checksummed: ClassVar[bool] = False

    #: the input, if the arena is not shared
    data: NDArray[np.uint8] | None = None
    #: the masks of the step's output rows, for the last shard; they are made while the shards before it work
    masks: WireMasks | None = None


class Embed(msgspec.Struct, tag=True):
    """Look up rows of the token table; for the first shard. The response has "rows", float32 [tokens, H]."""

    tokens: NDArray[np.int32]


class Project(msgspec.Struct, tag=True):
    """Multiply rows [n, H] with the head, as Shard.ends.project; for the last shard."""

    hidden: NDArray[np.float32]
    top: int
    logits: bool
    scale: float
    softcap: float


class Done(msgspec.Struct, tag=True):
    """A request is done; of Forward and Project the response has the result."""

    checksummed: ClassVar[bool] = False

    #: of a step: what each device worked
    seconds: tuple[float, ...] = ()
    output: Output | None = None
    #: the output activation, if the arena is not shared
    data: NDArray[np.uint8] | None = None


class Tensors(msgspec.Struct, tag=True):
    """The tensors that a request asked for, by name."""

    tensors: dict[str, np.ndarray]


class Accept(msgspec.Struct, tag=True):
    """Commit these draft rows of a slot."""

    slot: int
    rows: tuple[int, ...]


class UpdateRanking(msgspec.Struct, tag=True):
    """Add pages of full attention to the page ranking of a slot, or drop the slot if there are none.

    See Shard.ranking.add and Shard.ranking.drop.
    """

    slot: int
    #: which pages of the sequence they are
    entries: tuple[int, ...]
    pages: tuple[int, ...]


class RankPages(msgspec.Struct, tag=True):
    """Estimate how much the slot's row at `position` attends to ranked pages. See Shard.ranking.rank.

    The response has "scores", float64 [layers, entries].
    """

    slot: int
    position: int
    entries: NDArray[np.int32]


class Save(msgspec.Struct, tag=True):
    """Save the state of a slot, if one is named, and these pages of each page group. See Shard.state.save."""

    #: the number that identifies the saved state from now on; the server chooses it
    saved: int
    slot: int | None
    pages: tuple[tuple[int, ...], ...]
    held: bool


class SavedTensor(msgspec.Struct):
    """A tensor of a saved state."""

    dtype: str
    shape: tuple[int, ...]
    #: whether its rows are those of pages
    paged: bool


class Saved(msgspec.Struct, tag=True):
    """The response to Save, once the copies are complete."""

    #: the tensors that can be fetched
    tensors: dict[str, SavedTensor]
    #: bytes of all tensors, also of those that cannot be fetched
    nbytes: int


class Fetch(msgspec.Struct, tag=True):
    """Fetch tensors of a saved state."""

    saved: int
    names: tuple[str, ...]
    #: of paged tensors only `count` pages from page `first` on; None for all that follow
    first: int
    count: int | None


class Restore(msgspec.Struct, tag=True):
    """Copy a saved state into a slot and pages. See Shard.state.restore."""

    saved: int
    slot: int | None
    pages: tuple[tuple[int, ...], ...]
    #: the first page of the saved state to copy
    first: int


class Drop(msgspec.Struct, tag=True):
    """Release saved states."""

    saved: tuple[int, ...]


class Observe(msgspec.Struct, tag=True):
    """Keep how a device's work of a phase compares with its prediction, beside its profile."""

    #: which of the devices that hold layers
    device: int
    phase: Phase
    observed: Observed


class LoadState(msgspec.Struct, tag=True):
    """Copy tensors of layers [begin, end) into a slot and pages. See Shard.state.load."""

    slot: int | None
    pages: tuple[tuple[int, ...], ...]
    layers: tuple[int, int]
    tensors: dict[str, np.ndarray]


Steps = Load | Announce | Forward | Embed | Project | Accept | UpdateRanking | RankPages
SavedStates = Save | Fetch | Restore | Drop | LoadState
Request = Open | Measure | Probe | Steps | SavedStates | Observe
Response = Hello | Measured | Probed | Loaded | Done | Tensors | Saved | Failed
