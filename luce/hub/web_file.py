"""A GGUF file behind a URL that is not the hub's, downloaded into Luce's own folder."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from luce.errors import ModelError, UnreachableError
from luce.hub.names import WebName
from luce.hub.packaged import own_directory
from luce.hub.partial import INCOMPLETE, Source, receive
from luce.hub.reporting import Progress, quiet_library, size_text
from luce.hub.repository import check_space
from luce.hub.transport_errors import status_text, transport_errors

_MAGIC = b"GGUF"


def file_of(name: WebName) -> Path:
    """Where the file is, or will be: two URLs with the same last part have different folders."""
    folder = hashlib.sha256(name.url.encode()).hexdigest()[:8]
    return own_directory() / f"{urlsplit(name.url).hostname}-{folder}" / name.file


def download(name: WebName, progress: Progress) -> Path:
    """Download the file, unless it is there. A broken download is resumed where the server says by an ETag or a date
    that the file is still the same.

    Raises ModelError if the server refuses it, if it is no GGUF file, or if the disk has no space for it; and
    UnreachableError if the server does not answer.
    """
    target = file_of(name)
    if target.exists():
        return target
    with _translated(name), quiet_library(progress):
        size, version = _head(name.url)
        # Bytes of another version are never continued.
        part = hashlib.sha256(version.encode()).hexdigest()[:8] if version else secrets.token_hex(4)
        partial = target.with_name(f"{target.name}.{part}{INCOMPLETE}")
        there = partial.stat().st_size if partial.exists() else 0
        check_space(name.url, target.parent, max(0, size - there), "CACHE_DIRECTORY")
        progress.step(f"downloading {name.file}" + (f", {size_text(size)}" if size else ""))
        headers = {"Accept-Encoding": "identity"} | ({"If-Range": version} if version else {})
        source = Source(name.file, name.url, headers, size=size or None)
        receive(source, target, partial, progress, lambda done: progress.update(done, size))
    with open(target, "rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        target.unlink()
        raise ModelError(f"model {name.url!r}: is not a GGUF file (it starts with {magic!r})")
    return target


def _head(url: str) -> tuple[int, str]:
    """The size, 0 if it is not known, and what tells versions apart: a strong ETag, the time of the last change, or
    nothing."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    response = get_session().head(url, headers={"Accept-Encoding": "identity"}, timeout=10.0)
    if response.status_code in (HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED):
        return 0, ""
    hf_raise_for_status(response)
    etag = response.headers.get("ETag", "")
    strong = "" if etag.startswith("W/") else etag
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else 0, strong or response.headers.get("Last-Modified", "")


@contextlib.contextmanager
def _translated(name: WebName) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        with transport_errors(name.url, urlsplit(name.url).netloc, file_of(name).parent):
            yield
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        kind = UnreachableError if status >= HTTPStatus.INTERNAL_SERVER_ERROR else ModelError
        raise kind(f"model {name.url!r}: the server answers {status_text(status)}") from error
