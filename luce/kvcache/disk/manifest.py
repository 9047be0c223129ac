"""The manifest of a snapshot: its tokens, its files, and the snapshot that it continues.

The manifest is written last. A directory without a whole manifest is not a snapshot.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

import msgspec

from luce.decoders import json_decoder
from luce.kvcache.disk.part import DamagedError, PartInfo, digest
from luce.kvcache.prefix_ids import PrefixIds, key_bytes
from luce.runtime.step import PAGE

#: version of the directory, of manifests and of parts; see FORMAT.md
FORMAT = 4
#: the directory below --kv-cache-dir
LAYOUT = f"luce-v{FORMAT}"
#: the file of a manifest
MANIFEST = "manifest.json"
#: tensors of a checkpoint beside the model's own; FEATURES begins the names of several tensors
LOGITS, PROMPT_END, RESIDENCY, FEATURES = "logits", "prompt_end", "residency", "features"
#: largest file of a manifest that is read: page keys of 30 million tokens
MOST_BYTES = 16 << 20
#: hex digits of a key in ids and in `page_keys`
_DIGITS = 32
_ID = re.compile(r"[0-9a-f]{32}-\d{1,18}")
_PART = re.compile(r"[a-z0-9-]{1,100}\.part")


class ReplyTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a reply's texts: later prompts repeat the texts and get the same tokens."""

    #: for each text its digest and the positions [begin, end) of its tokens
    texts: tuple[tuple[str, int, int], ...]
    #: tokens of the reply after those of the snapshot: usually the last one
    rest: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    """One snapshot."""

    format: int
    #: the version of Luce that wrote it
    writer: str
    #: luce.kvcache.disk.fingerprint.Fingerprint.model
    model: str
    #: name in the model's directory: 32 hex digits of the key, "-", the length
    id: str
    #: BLAKE2b-256 of luce.kvcache.prefix_ids.key_bytes, in hex
    key: str
    #: tokens
    length: int
    #: seconds since the epoch
    created: float
    #: id of the snapshot whose pages this one continues
    parent: str | None
    #: the first page that this snapshot stores itself; the pages before it are the parent's
    first_page: int
    #: whether a longer snapshot of the same conversation replaces this one
    interim: bool
    #: whether a sequence can resume here; if not, only the pages are left, for the snapshots that continue them
    resumable: bool
    #: whether the logits of the last token are stored
    has_logits: bool
    #: the file with the tokens from page `first_page` on
    tokens: PartInfo
    #: files with whole pages
    pages: tuple[PartInfo, ...]
    #: files with the rest of the checkpoint
    state: tuple[PartInfo, ...]
    #: bytes before compression
    raw_bytes: int
    reply: ReplyTokens | None = None
    #: PrefixIds from here to the end of the prompt, if the logits of that end are stored
    prompt_end: tuple[int, ...] = ()
    #: for each page that this snapshot stores itself, the first 32 hex digits of the key of the tokens up to its end
    page_keys: str = ""

    @property
    def parts(self) -> tuple[PartInfo, ...]:
        """All files."""
        return (self.tokens, *self.pages, *self.state)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(part.bytes for part in self.parts)

    def encode(self) -> bytes:
        """One line of JSON, and a line with its digest."""
        line = msgspec.json.encode(self)
        return line + b"\n" + digest(line).encode() + b"\n"


def decode(data: bytes, model: str, id: str) -> Manifest:
    """The manifest of snapshot `id` of a model. Raises DamagedError."""
    line, _, rest = data.partition(b"\n")
    if rest != digest(line).encode() + b"\n":
        raise DamagedError(f"{id}: wrong checksum of the manifest")
    try:
        manifest = json_decoder(Manifest).decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DamagedError(f"{id}: {error}") from error
    if (manifest.format, manifest.model, manifest.id) != (FORMAT, model, id):
        raise DamagedError(f"{id}: the manifest is that of {manifest.model}/{manifest.id}, format {manifest.format}")
    if snapshot_id(manifest.key, manifest.length) != id or manifest.parent == id:
        raise DamagedError(f"{id}: the manifest has the key of another snapshot, or continues itself")
    names = [part.name for part in manifest.parts]
    for name in names:
        if not _PART.fullmatch(name):
            raise DamagedError(f"{id}: the manifest names a part {name[:100]!r}")
    if len(set(names)) != len(names):
        raise DamagedError(f"{id}: the manifest names a part twice")
    pages = manifest.length // PAGE
    if not 0 <= manifest.first_page <= pages or any(part.bytes < 0 for part in manifest.parts):
        raise DamagedError(f"{id}: the manifest names impossible pages or sizes")
    if manifest.reply is not None and any(not 0 <= begin <= end for _, begin, end in manifest.reply.texts):
        raise DamagedError(f"{id}: the manifest names impossible positions of a reply")
    if len(manifest.page_keys) not in (0, _DIGITS * (pages - manifest.first_page)):
        raise DamagedError(f"{id}: the manifest has a wrong number of page keys")
    return manifest


def without_state(manifest: Manifest) -> Manifest:
    """The manifest of a snapshot after it lost everything but its tokens and pages."""
    return msgspec.structs.replace(manifest, resumable=False, has_logits=False, prompt_end=(), state=())


def with_state(manifest: Manifest, other: Manifest) -> Manifest:
    """A manifest with the state of another snapshot of the same tokens."""
    return msgspec.structs.replace(
        manifest,
        resumable=True,
        has_logits=other.has_logits,
        prompt_end=other.prompt_end,
        state=other.state,
        interim=other.interim,
        created=other.created,
        reply=other.reply or manifest.reply,
    )


def snapshot_id(key: str, length: int) -> str:
    """The id of the snapshot of `length` tokens with this key."""
    return f"{key[:_DIGITS]}-{length}"


def is_snapshot_id(name: str) -> bool:
    """Whether a directory's name is that of a snapshot."""
    return _ID.fullmatch(name) is not None


def page_keys(ids: PrefixIds, first_page: int = 0) -> Iterator[str]:
    """For each whole page of `ids` from `first_page` on, the first digits of the key of the tokens up to its end."""
    return (key[:_DIGITS] for _, key in keys(ids, range((first_page + 1) * PAGE, len(ids) + 1, PAGE)))


def own_page_keys(manifest: Manifest) -> list[str]:
    """`page_keys` of a manifest, one by one."""
    return [manifest.page_keys[at : at + _DIGITS] for at in range(0, len(manifest.page_keys), _DIGITS)]


def keys(ids: PrefixIds, lengths: Iterable[int]) -> Iterator[tuple[int, str]]:
    """(length, key) of the prefixes of `ids` that have these lengths, ascending, in one pass."""
    hashed, at = hashlib.blake2b(digest_size=32), 0
    for length in lengths:
        hashed.update(key_bytes(ids[at:length]))
        at = length
        yield length, hashed.copy().hexdigest()
