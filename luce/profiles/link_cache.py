"""Links to daemons in the user's cache folder: a file for each daemon's devices, the way to it, and its address."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from luce.profiles.cached_file import counts, read_cached, write_cached
from luce.profiles.profile import LinkProfile
from luce.profiles.profile_cache import profile_folder

_FORMAT = 1


class _Stored(msgspec.Struct):
    format: int
    #: seconds since 1970
    measured: float
    link: LinkProfile


def link_path(keys: Sequence[str], transport: str, address: str, folder: Path | None = None) -> Path:
    """The file of the link from this machine to the devices with these keys (profile_key).

    `transport`: how activations travel. `address`: of a daemon on another machine, empty on this one.
    """
    facts = [platform.node(), list(keys), transport, address]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return (folder or profile_folder()) / f"{key}.json"


def read_link(path: Path) -> LinkProfile | None:
    """The link in a file; None if there is none, if it is too old, or if the file has no link, which the log says."""
    stored = read_cached(path, _Stored)
    if stored is None:
        return None
    flaw = stored.link.flaw if stored.format == _FORMAT else f"format is {stored.format}"
    return stored.link if counts(path, flaw, stored.measured) else None


def write_link(path: Path, link: LinkProfile) -> None:
    """Keep a link in a file. Where that cannot be written, the log says why."""
    write_cached(path, _Stored(_FORMAT, time.time(), link))
