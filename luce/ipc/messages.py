"""What a server and a daemon say to each other. The server asks, and gets one answer to each request, in order.

    Open     -> Hello     which devices; their facts
    Load     -> Loaded    which layers of which file; what they take
    Announce              no answer: the step of the next Forward, while its input is still computed
    Forward  -> Done      its input is there; input and output lie in shared memory, or in the messages
    Embed    -> Embedded  rows of the token table
    Project  -> Done      the head's product with rows
    Accept   -> Done      rows of a speculative span count
    Seal     -> Done      pages of a sequence that nobody writes to any more can be ranked
    Unseal   -> Done      nobody is going to ask for them
    Rank     -> Ranked    which of them matter
    Save     -> Saved     a sequence's state stays with the daemon, by the number of the request
    Fetch    -> Fetched   some tensors of it
    Restore  -> Done
    Drop                  no answer: some of it is of no use any more
    Fill     -> Done      tensors for slots and pages

A daemon that holds a drafter instead of layers is asked other things:

    LoadDraft -> DraftLoaded  which drafter for which model
    Propose   -> Proposed     how texts went on; what comes next in some of them
    Rest      -> Done         nobody asks for now: memory that can be had again may go

Any other request may be answered by Failed instead. The end of the connection ends the daemon. A Step and an Output
travel field by field as they are declared, so what a later version adds to them needs no new message. On a second
channel the server sends Ping and gets Pong, whatever the daemon is at. `summed` False: its arrays get no checksum.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.runtime.step import Output, Step


class Open(msgspec.Struct, tag=True):
    """The first message. `luce` is the version; `threads` as --threads."""

    luce: str
    devices: tuple[str, ...]
    log_level: str
    threads: int


class DeviceFacts(msgspec.Struct):
    """A device as the server plans with it. Memory in bytes; `facts` are for people."""

    name: str
    host: bool
    lanes: int
    kv_dtype: str
    free: int
    total: int
    facts: dict[str, str | int]


class Hello(msgspec.Struct, tag=True):
    """The answer to Open."""

    luce: str
    pid: int
    devices: tuple[DeviceFacts, ...]


class Load(msgspec.Struct, tag=True):
    """Layers [begin, end) of a file for each device; `fingerprint` of the file as the server sees it.

    verify: most rows of a speculative span or a tree. captured: layers whose output is handed on, by the last one too.
    ranked: whether pages can be sealed. spare: bytes of each device in which matrices may be kept unpacked. rows: most
    rows of a Forward. arena: bytes of the shared memory, whose descriptor follows if `shared`. wire: one of
    luce.remote.activation_codec.WIRES, if it is not.
    """

    path: str
    fingerprint: str
    layers: tuple[tuple[int, int], ...]
    pages: tuple[int, ...]
    slots: int
    kv: tuple[str, str]
    verify: int
    captured: tuple[int, ...]
    ranked: bool
    spare: tuple[int, ...]
    rows: int
    peer: bool
    arena: int
    shared: bool
    wire: str = "f32"


class Part(msgspec.Struct):
    """What lies on one device, in bytes."""

    device: str
    layers: tuple[int, int]
    weights: int
    state: int
    unpacked: int


class Loaded(msgspec.Struct, tag=True):
    """The answer to Load. Columns of each array that is taken and handed on; entries of the vocabulary.

    words: whether the devices wait for the arena's words, and tell them, by themselves.
    """

    parts: tuple[Part, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    vocab: int
    words: bool


class Announce(msgspec.Struct, tag=True):
    """The step that the next Forward runs. What it takes and gives has these places in the arena, -1 for none.

    given: the arena's word of this name reaches it when the input is there, so that a GPU can wait for that by itself;
    None if only Forward says it. The server lets it happen before it asks for anything else.
    told: likewise for the output, which lies at `answer` then (luce.remote.shared_layout.Answer), and what was captured
    at `target`; None if Done brings the output.
    """

    step: Step
    source: int
    target: int
    given: int | None = None
    answer: int = -1
    told: int | None = None


class Forward(msgspec.Struct, tag=True):
    """Run the announced step. `data`: the input, if it is not shared."""

    summed: ClassVar[bool] = False

    data: NDArray[np.uint8] | None = None


class Embed(msgspec.Struct, tag=True):
    """Rows of the token table; for the first shard."""

    tokens: NDArray[np.int32]


class Embedded(msgspec.Struct, tag=True):
    """The answer to Embed: [tokens, H]."""

    rows: NDArray[np.float32]


class Project(msgspec.Struct, tag=True):
    """The head's product with rows [n, H], as Shard.project; for the last shard."""

    hidden: NDArray[np.float32]
    top: int
    logits: bool
    scale: float
    softcap: float


class Done(msgspec.Struct, tag=True):
    """A Forward, Project, Accept, Seal, Unseal, Restore, Fill or Rest is done.

    `data`: what is handed on, if it is not shared; `seconds`: what the work took.
    """

    summed: ClassVar[bool] = False

    seconds: float = 0.0
    output: Output | None = None
    data: NDArray[np.uint8] | None = None


class Accept(msgspec.Struct, tag=True):
    """These rows of the slot's speculative spans count."""

    slot: int
    rows: tuple[int, ...]


class Seal(msgspec.Struct, tag=True):
    """Pages of full attention of a slot, and which of its sequence they are. See Shard.seal."""

    slot: int
    entries: tuple[int, ...]
    pages: tuple[int, ...]


class Unseal(msgspec.Struct, tag=True):
    """Give up what was kept of a slot's pages. See Shard.unseal."""

    slot: int


class Rank(msgspec.Struct, tag=True):
    """How much the slot's row at `position` attends to these pages. See Shard.rank."""

    slot: int
    position: int
    entries: NDArray[np.int32]


class Ranked(msgspec.Struct, tag=True):
    """The answer to Rank: [layers, entries]."""

    scores: NDArray[np.float64]


class Save(msgspec.Struct, tag=True):
    """Put aside a slot's state, if there is one, and these pages of each page group. See Shard.save."""

    slot: int | None
    pages: tuple[tuple[int, ...], ...]
    held: bool


class Kind(msgspec.Struct):
    """A tensor that was put aside. `paged`: whether it is made of pages."""

    dtype: str
    shape: tuple[int, ...]
    paged: bool


class Saved(msgspec.Struct, tag=True):
    """The answer to Save, when the copies are there: tensors that can be fetched, and the bytes of all there are."""

    kinds: dict[str, Kind]
    nbytes: int


class Fetch(msgspec.Struct, tag=True):
    """Tensors of what request `kept` put aside; of those that are made of pages, `count` from page `first` on."""

    kept: int
    names: tuple[str, ...]
    first: int
    count: int | None


class Fetched(msgspec.Struct, tag=True):
    """The answer to Fetch."""

    tensors: dict[str, np.ndarray]


class Restore(msgspec.Struct, tag=True):
    """The reverse of Save. See Shard.restore."""

    kept: int
    slot: int | None
    pages: tuple[tuple[int, ...], ...]
    first: int


class Drop(msgspec.Struct, tag=True):
    """What these requests put aside is of no use any more."""

    kept: tuple[int, ...]


class Fill(msgspec.Struct, tag=True):
    """Tensors of layers [begin, end) for a slot and pages. See luce.shard.saved_state.Piece."""

    slot: int | None
    pages: tuple[tuple[int, ...], ...]
    layers: tuple[int, int]
    tensors: dict[str, np.ndarray]


class LoadDraft(msgspec.Struct, tag=True):
    """The drafter `draft` (as --draft: a path or mtp) for the model at `path`, on the daemon's first device.

    Fingerprints of both files as the server sees them, the draft's empty if it is the model's own block. slots: texts
    at a time; context: positions that the drafter sees at most; window: as --draft-swa; keep: whether it stays loaded
    while nobody asks.
    """

    path: str
    fingerprint: str
    draft: str
    draft_fingerprint: str
    slots: int
    context: int
    window: int
    keep: bool


class DraftLoaded(msgspec.Struct, tag=True):
    """The answer to LoadDraft: its kind, most tokens that it proposes, layers of the model whose output it reads."""

    kind: str
    block: int
    layers: tuple[int, ...]


class Told(msgspec.Struct):
    """How the text of a slot goes on: tokens from position `at` on; and what the model's layers gave at the positions
    from `begin` on, `rows` of Propose.features. fresh: it is another text than before."""

    slot: int
    fresh: bool
    at: int
    tokens: NDArray[np.int32]
    begin: int
    rows: int


class Propose(msgspec.Struct, tag=True):
    """features: bfloat16 as uint16 [rows, layers * H], of what is told side by side. asked: (slot, most tokens,
    depth of a tree or 0), each slot once: texts whose last token the model has not computed, and all of whose other
    ones it has."""

    summed: ClassVar[bool] = False

    told: tuple[Told, ...]
    features: NDArray[np.uint16]
    asked: tuple[tuple[int, int, int], ...]


class Proposed(msgspec.Struct, tag=True):
    """The answer to Propose: for each that was asked tokens, and chances of all of them or none; and of a tree
    each token's parent, as luce.draft.drafter.Proposal."""

    tokens: tuple[NDArray[np.int32], ...]
    chances: tuple[NDArray[np.float64], ...]
    parents: tuple[NDArray[np.int32], ...]


class Rest(msgspec.Struct, tag=True):
    """No sequence runs or waits."""


class Failed(msgspec.Struct, tag=True):
    """A request could not be done. `error`: the name of a class of luce.errors."""

    error: str
    message: str


class Ping(msgspec.Struct, tag=True):
    """Are you there?"""


class Pong(msgspec.Struct, tag=True):
    """What the daemon is at: the oldest request that is not answered, empty if there is none, and the seconds since it
    came; how many there are; the share of its layers that are read; and of each device the bytes of memory that were
    free when it was last looked at, and all, nothing as long as that is not known."""

    request: str = ""
    seconds: float = 0.0
    requests: int = 0
    read: float = 0.0
    memory: tuple[tuple[int, int], ...] = ()


Ranking = Seal | Unseal | Rank
Layers = Load | Announce | Forward | Embed | Project | Accept | Ranking | Save | Fetch | Restore | Drop | Fill
Drafting = LoadDraft | Propose | Rest
Request = Open | Layers | Drafting
Reply = Hello | Loaded | Done | Embedded | Ranked | Saved | Fetched | DraftLoaded | Proposed | Failed
