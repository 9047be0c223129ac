"""The manifest of a stored snapshot: what it is of, and which files hold it. Written last, it makes the rest count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from luce.kvcache.disk.part import DamagedError, PartInfo, digest
from luce.runtime.step import PAGE, Int32

FORMAT = 3
#: hex digits of a key that ids and prefixes have
_DIGITS = 32
#: the file of a manifest, the names of the tensors with a point's logits, those behind its opening and its residency,
#: and how the name of that with features begins
MANIFEST, LOGITS, OPENING, RESIDENCY, FEATURES = "manifest.json", "logits", "opening", "residency", "features"


class Recall(msgspec.Struct, frozen=True, array_like=True):
    """Texts of a reply, so that they come back in later prompts with the ids that they were made of.

    texts   of each its digest, and where its ids are: positions [begin, end)
    behind  ids of the reply that no state has seen: as a rule its last one
    """

    texts: tuple[tuple[str, int, int], ...]
    behind: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    """One snapshot.

    id       its name in the model's directory: 32 hex digits of the key, "-", the length
    key      BLAKE2b-256 of the tokens, int32 little-endian, in hex
    parent   the snapshot whose tokens these begin with, and whose whole pages these continue; None for none
    first    the first page that this one stores itself, a whole page count of the parent's
    passing  whether a longer snapshot of the same conversation makes this one dispensable
    point    whether it can be resumed; else only its pages are left, for those that continue them
    logits   whether those of the last token are there
    tokens, pages, state   files: the tokens from page `first` on; whole pages; what a point has beside them
    raw      bytes before compression
    recall   texts of the reply that it ends with
    opening  ids of the prompt that it was made of behind its own, if the logits behind them are there
    prefixes how keys begin: for each whole page that this one stores itself, that of the tokens up to its end
    """

    format: int
    writer: str
    model: str
    id: str
    key: str
    length: int
    created: float
    parent: str | None
    first: int
    passing: bool
    point: bool
    logits: bool
    tokens: PartInfo
    pages: tuple[PartInfo, ...]
    state: tuple[PartInfo, ...]
    raw: int
    recall: Recall | None = None
    opening: tuple[int, ...] = ()
    prefixes: str = ""

    @property
    def parts(self) -> tuple[PartInfo, ...]:
        """All files."""
        return (self.tokens, *self.pages, *self.state)

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(part.bytes for part in self.parts)

    def encode(self) -> bytes:
        """One line of JSON, and a line with its digest."""
        line = msgspec.json.encode(self)
        return line + b"\n" + digest(line).encode() + b"\n"


def decode(data: bytes, model: str, id: str) -> Manifest:
    """The manifest of the snapshot `id` of a model. Raises DamagedError."""
    line, _, rest = data.partition(b"\n")
    if rest != digest(line).encode() + b"\n":
        raise DamagedError(f"{id}: the checksum of the manifest is wrong")
    try:
        manifest = msgspec.json.decode(line, type=Manifest)
    except msgspec.DecodeError as error:
        raise DamagedError(f"{id}: {error}") from error
    if (manifest.format, manifest.model, manifest.id) != (FORMAT, model, id):
        raise DamagedError(f"{id}: the manifest is that of {manifest.model}/{manifest.id}, format {manifest.format}")
    names = [part.name for part in manifest.parts]
    whole = manifest.length // PAGE
    if any("/" in name or name.startswith(".") for name in names) or not 0 <= manifest.first <= whole:
        raise DamagedError(f"{id}: the manifest names impossible files or pages")
    if len(manifest.prefixes) not in (0, _DIGITS * (whole - manifest.first)):
        raise DamagedError(f"{id}: the manifest has prefixes of other pages")
    return manifest


def without_state(manifest: Manifest) -> Manifest:
    """The manifest of a snapshot of which only tokens and pages are left."""
    return msgspec.structs.replace(manifest, point=False, logits=False, opening=(), state=())


def with_state(manifest: Manifest, other: Manifest) -> Manifest:
    """A manifest with the state of another one of the same tokens."""
    return msgspec.structs.replace(
        manifest,
        point=True,
        logits=other.logits,
        opening=other.opening,
        state=other.state,
        passing=other.passing,
        created=other.created,
        recall=other.recall or manifest.recall,
    )


def snapshot_id(key: str, length: int) -> str:
    """The id of a snapshot."""
    return f"{key[:_DIGITS]}-{length}"


def prefixes(ids: Int32, first: int = 0) -> Iterator[str]:
    """Of each whole page of `ids` from `first` on, how the key begins of the tokens up to its end."""
    return (key[:_DIGITS] for _, key in keys(ids, range((first + 1) * PAGE, len(ids) + 1, PAGE)))


def own_prefixes(manifest: Manifest) -> list[str]:
    """Those that a manifest has."""
    return [manifest.prefixes[at : at + _DIGITS] for at in range(0, len(manifest.prefixes), _DIGITS)]


def keys(ids: Int32, lengths: Iterable[int]) -> Iterator[tuple[int, str]]:
    """(length, key) of the prefixes of `ids` that have these lengths, ascending, in one pass."""
    hashed, at = hashlib.blake2b(digest_size=32), 0
    little = ids.astype("<i4")
    for length in lengths:
        hashed.update(little[at:length].tobytes())
        at = length
        yield length, hashed.copy().hexdigest()
