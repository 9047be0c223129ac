"""Snapshots that nobody wrote: whoever can write a directory can compute every checksum in it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from luce.kvcache.disk.files import make_directory, open_directory
from luce.kvcache.disk.index import Snapshot
from luce.kvcache.disk.manifest import FORMAT, LAYOUT, MANIFEST, Manifest, keys, page_keys, snapshot_id
from luce.kvcache.disk.part import PartInfo, PartWriter
from luce.runtime.step import PAGE, Int32
from tests.support.snapshots import MODEL, page


def replace_manifest(snapshot: Snapshot, **changes: Any) -> None:
    """Change fields of a manifest."""
    data = msgspec.structs.replace(snapshot.manifest, **changes).encode()
    (snapshot.path / MANIFEST).write_bytes(data)


def part(path: Path, tensors: Mapping[str, tuple[int, NDArray[np.generic]]]) -> PartInfo:
    """A part with tensors by name: (page, array)."""
    with open_directory(path.parent) as directory:
        writer = PartWriter(directory, path.name)
        for name, (number, array) in tensors.items():
            writer.add(name, array, number)
        return writer.finish()


def replace_part(snapshot: Snapshot, kind: str, tensors: Mapping[str, tuple[int, NDArray[np.generic]]]) -> None:
    """Put other tensors into a new part of kind "tokens", "pages" or "state", beside the others of its kind."""
    manifest = snapshot.manifest
    if kind == "tokens":
        (snapshot.path / "tokens.part").unlink()
        replace_manifest(snapshot, tokens=part(snapshot.path / "tokens.part", tensors))
        return
    info = part(snapshot.path / f"{kind}-{secrets.token_hex(4)}.part", tensors)
    replace_manifest(snapshot, **{kind: (*getattr(manifest, kind), info)})


def chain(root: Path, whole: Int32) -> None:
    """Snapshots of all numbers of pages of a text, each of which continues the one before."""
    directory = root / LAYOUT / MODEL
    make_directory(directory)
    parent = None
    lengths = range(PAGE, len(whole) + 1, PAGE)
    for first, ((length, key), own) in enumerate(zip(keys(whole, lengths), page_keys(whole), strict=True)):
        id = snapshot_id(key, length)
        (directory / id).mkdir(mode=0o700)
        tokens = whole[length - PAGE : length].astype("<i4")
        pages = {name: (first, tensor) for name, tensor in page(tokens).items()}
        manifest = Manifest(
            format=FORMAT,
            writer="forged",
            model=MODEL,
            id=id,
            key=key,
            length=length,
            created=time.time(),
            parent=parent,
            first_page=first,
            interim=False,
            resumable=True,
            has_logits=False,
            tokens=part(directory / id / "tokens.part", {"tokens": (-1, tokens)}),
            pages=(part(directory / id / "pages-000-003.part", pages),),
            state=(),
            raw_bytes=PAGE * 28,
            page_keys=own,
        )
        (directory / id / MANIFEST).write_bytes(manifest.encode())
        parent = id
