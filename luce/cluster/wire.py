"""What coordinator, members and the `luce cluster` commands send, in frames of luce.ipc.channel.

A host that joins sends Join and gets Joined or Refused. A member's control connection begins with Hello; then the
coordinator sends Ping, Find, Assign, NewPin, Notice, Leave and Dismissed, and the member Pong, Found, Loaded, Unable,
Unfit, Pinned and Leaving. A member that lacks the model file, or checks it, asks over a connection of its own:
AskLayout, AskBytes and AskSum, which are answered in their order; Needs has no answer. The commands send one request
over the socket in the cluster's directory and get one response.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

#: roles in the greeting of a connection, beside those of luce.ipc.tcp
CONTROL, WEIGHTS = b"C", b"F"
#: most bytes of an AskBytes
LARGEST_PIECE = 4 << 20

#: a number of bytes, or an offset; no file is larger
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Join(msgspec.Struct, tag=True):
    """A host asks to become a member."""

    id: bytes
    secret: bytes
    #: DER
    certificate: bytes
    luce: str
    hostname: str


class Joined(msgspec.Struct, tag=True):
    """The host is a member, once it connects with its key."""


class Refused(msgspec.Struct, tag=True):
    """The token lets nobody in."""


class Hello(msgspec.Struct, tag="MemberHello"):
    """A member's first message on its control connection."""

    luce: str
    devices: tuple[str, ...]


class Ping(msgspec.Struct, tag=True):
    """Asks for a Pong."""


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes of a device's memory; None: not known, such as what is free of a GPU without layers."""

    free: Count | None
    total: Count | None


class Pong(msgspec.Struct, tag=True):
    """The member is there."""

    #: of each of its devices; empty: it does not say
    memory: tuple[DeviceMemory, ...] = ()


class Find(msgspec.Struct, tag=True):
    """Asks for Found."""

    #: luce.gguf.fingerprint of a model file
    fingerprint: str
    #: whether the coordinator sends what a member lacks
    streams: bool = False


class Found(msgspec.Struct, tag=True):
    """Whether the member has the file."""

    fingerprint: str
    #: why it has not, "" if it has, or gets what it lacks
    problem: str
    #: whether it gets what it lacks
    streamed: bool = False


class Assign(msgspec.Struct, tag=True):
    """Connect with this token, and serve layers of a file."""

    epoch: int
    token: bytes
    fingerprint: str
    #: whether the coordinator sends what the member lacks
    streams: bool = False


class Loaded(msgspec.Struct, tag="MemberLoaded"):
    """The layers of an epoch are loaded."""

    epoch: int


class Unable(msgspec.Struct, tag=True):
    """The member cannot do what Assign asked for."""

    token: bytes
    reason: str


class Unfit(msgspec.Struct, tag=True):
    """The member cannot have the weights of its layers: its disk is full, or its file differs."""

    fingerprint: str
    reason: str


class NewPin(msgspec.Struct, tag=True):
    """The coordinator will have this certificate (DER)."""

    certificate: bytes


class Pinned(msgspec.Struct, tag=True):
    """The certificate of NewPin is stored."""


class Notice(msgspec.Struct, tag=True):
    """What the member's log is to say."""

    text: str


class Release(msgspec.Struct, tag=True):
    """The member has no layers: it frees the weights that it holds for the next placement."""


class Leave(msgspec.Struct, tag=True):
    """The member is to leave, as behind SIGTERM."""


class Dismissed(msgspec.Struct, tag=True):
    """The coordinator ends the connection. `final`: the member need not connect again."""

    reason: str
    final: bool


class Leaving(msgspec.Struct, tag=True):
    """The member ends once it is dismissed: it serves its layers until then."""


FromMember = Hello | Pong | Found | Loaded | Unable | Unfit | Pinned | Leaving
FromCoordinator = Ping | Find | Assign | Release | NewPin | Notice | Leave | Dismissed


class AskLayout(msgspec.Struct, tag=True):
    """Asks for Layout."""


class Layout(msgspec.Struct, tag=True):
    """The files of the model: of each its bytes, and where its tensors begin."""

    files: tuple[tuple[Count, Count], ...]


class Needs(msgspec.Struct, tag=True):
    """How many bytes the member needs for its layers, and how many of them are there."""

    size: Count
    there: Count


class AskBytes(msgspec.Struct, tag=True):
    """Asks for FileBytes: `size` bytes of a file of the model, by its number, from `offset` on."""

    part: Count
    offset: Count
    size: Count


class FileBytes(msgspec.Struct, tag=True):
    """What AskBytes asked for; TLS has its checksum, and each tensor one of its own."""

    data: NDArray[np.uint8]


class AskSum(msgspec.Struct, tag=True):
    """Asks for TensorSum of a tensor."""

    tensor: str


class TensorSum(msgspec.Struct, tag=True):
    """The SHA-256 of a tensor's bytes in the coordinator's file."""

    sha256: bytes


ForWeights = AskLayout | Needs | AskBytes | AskSum
Weights = Layout | FileBytes | TensorSum


class AskStatus(msgspec.Struct, tag=True):
    """Asks for Status."""


class AskToken(msgspec.Struct, tag=True):
    """Asks for a join token, which holds for so many seconds. `lan`: without addresses."""

    seconds: float
    label: str
    lan: bool = False


class AskRemove(msgspec.Struct, tag=True):
    """Asks that a member be removed."""

    member: str


class AskDrain(msgspec.Struct, tag=True):
    """Asks that a member leave once other machines have its layers."""

    member: str


class AskRotate(msgspec.Struct, tag=True):
    """Asks for a new key of the coordinator."""


class AskReplan(msgspec.Struct, tag=True):
    """Asks that the model be placed anew, on the devices that are there now."""


class MemberStatus(msgspec.Struct):
    """A member, for `luce cluster status`."""

    name: str
    label: str
    state: str
    #: seconds in this state
    seconds: float
    address: str
    #: of the control connection; None before the first Pong
    round_trip_ms: float | None
    #: of an activation's way to its devices; None where it was not measured
    bytes_per_second: float | None
    devices: tuple[str, ...]
    #: of each device
    memory: tuple[DeviceMemory, ...]
    #: of each device with layers of the placement, FIRST..LAST
    layers: tuple[str, ...]
    luce: str
    #: whether it has the model file: own, streamed with how much of it is there, absent, or "" before it was asked
    file: str
    losses: int
    reason: str
    #: without layers: how much faster `luce cluster replan` would make the model, 0.15 for 15 %; None: not known
    gain_decode: float | None = None
    gain_prompt: float | None = None
    #: without layers: whether it is `luce cluster replan` that measures its devices, which no placement has considered
    unmeasured: bool = False


class StageStatus(msgspec.Struct):
    """A device's part of the placement."""

    device: str
    #: FIRST..LAST
    layers: str
    #: of a decoding step, None without figures of the devices
    predicted_ms: float | None = None


class PlanStatus(msgspec.Struct):
    """The placement of the loaded model. Rates are tokens per second of one reply, None: not known; those that are
    measured are of all replies that have ended since the load."""

    stages: tuple[StageStatus, ...]
    predicted_decode_tok_s: float | None = None
    predicted_prompt_tok_s: float | None = None
    measured_decode_tok_s: float | None = None
    measured_prompt_tok_s: float | None = None
    #: milliseconds of a decoding step that connections between members would save, whose activations pass the
    #: coordinator; None without figures
    direct_links_ms: float | None = None


class Status(msgspec.Struct, tag=True):
    """A cluster as it is."""

    cluster: str
    addresses: tuple[str, ...]
    epoch: int
    open_tokens: int
    #: weights sent to members since the start
    streamed_bytes: int
    #: placements since the start, by why the model was placed
    replans: dict[str, int]
    members: tuple[MemberStatus, ...]
    #: None while no model is loaded
    plan: PlanStatus | None = None


class Done(msgspec.Struct, tag=True):
    """What was asked for is done; `text` is for the user."""

    text: str


class Failed(msgspec.Struct, tag="CommandFailed"):
    """It cannot be done."""

    message: str


Command = AskStatus | AskToken | AskRemove | AskDrain | AskRotate | AskReplan
Result = Status | Done | Failed
