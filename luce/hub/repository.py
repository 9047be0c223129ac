"""A repository of the Hugging Face hub: its files, and their download into the hub's cache.

The cache is the one of huggingface_hub and of the tools that use it, in its layout:

    models--ORG--REPO/blobs/DIGEST              the bytes
    models--ORG--REPO/snapshots/COMMIT/NAME     a link to them
    models--ORG--REPO/refs/REVISION             the commit that a branch or tag had
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from luce import __version__
from luce.config.directories import hugging_face_cache
from luce.config.environment import environment
from luce.errors import LuceError, ModelError, UnreachableError, UsageError
from luce.hub.names import RepositoryName
from luce.hub.partial import INCOMPLETE, Source, check, meter, receive
from luce.hub.reporting import Progress, quiet_library, size_text
from luce.hub.transport_errors import status_text, transport_errors

#: bytes of the largest file that the hub sends over plain HTTP; larger ones need the library's own protocol
MOST_OVER_HTTP = 50_000_000_000
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    name: str
    #: bytes
    size: int
    #: of the bytes: SHA-256 of a large file, the SHA-1 of the git object of a small one
    digest: str


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    #: by name
    files: dict[str, RemoteFile]


def folder_of(repository: str) -> Path:
    """The folder of a repository in the hub's cache."""
    return hugging_face_cache() / f"models--{repository.replace('/', '--')}"


def list_files(name: RepositoryName, progress: Progress) -> Listing:
    """The files of a repository. Raises ModelError if the hub refuses it, UnreachableError if it does not answer, and
    UsageError for a name that the hub does not allow."""
    from huggingface_hub import HfApi, constants

    with _translated(name), quiet_library(progress):
        api = HfApi(endpoint=environment("HF_ENDPOINT"), library_name="luce", library_version=__version__)
        info = api.model_info(
            name.repository,
            revision=name.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    if not _COMMIT.fullmatch(info.sha or ""):
        raise ModelError(f"model {str(name)!r}: the hub names no commit of {name.repository}")
    files = {}
    for file in info.siblings or ():
        digest = (file.blob_id if file.lfs is None else file.lfs.sha256) or ""
        # Digests and names become paths here, whatever answers.
        inside = not os.path.isabs(file.rfilename) and ".." not in Path(file.rfilename).parts
        if file.size is not None and _DIGEST.fullmatch(digest) and inside:
            files[file.rfilename] = RemoteFile(file.rfilename, file.size, digest)
    return Listing(info.sha, files)


def download(name: RepositoryName, listing: Listing, files: Sequence[str], progress: Progress) -> Path:
    """Download files of a repository into the hub's cache, those that are not there; returns the path of the first.

    Raises ModelError as list_files; if the disk has no space for them; and if their bytes do not have the digests.
    """
    folder = folder_of(name.repository)
    wanted = [listing.files[file] for file in files]
    _check_space(name, folder, wanted)
    total, before = sum(file.size for file in wanted), 0

    def report(there: int) -> None:
        progress.update(before + there, total)

    with _translated(name), quiet_library(progress):
        for number, file in enumerate(wanted, 1):
            of = f" ({number} of {len(wanted)})" if len(wanted) > 1 else ""
            progress.step(f"downloading {file.name}{of}, {size_text(file.size)}")
            _receive(name, listing.commit, file, progress, report)
            before += file.size
        if not _COMMIT.fullmatch(name.revision):
            _write_ref(folder / "refs" / name.revision, listing.commit)
    return folder / "snapshots" / listing.commit / files[0]


def _check_space(name: RepositoryName, folder: Path, files: Sequence[RemoteFile]) -> None:
    """Raises ModelError if the disk lacks space for the bytes that are missing."""
    missing = 0
    for file in files:
        blob = folder / "blobs" / file.digest
        if not blob.exists():
            partial = _partial(blob)
            missing += max(0, file.size - (partial.stat().st_size if partial.exists() else 0))
    check_space(str(name), folder, missing, "HF_HUB_CACHE")


def check_space(name: str, directory: Path, missing: int, variable: str) -> None:
    """Raises ModelError if the disk of a directory, which need not exist yet, has no space for so many bytes.
    `variable`: by which the user chooses another directory."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if missing > free:
        raise ModelError(
            f"model {name!r}: {size_text(missing)} are to be downloaded, and {there} has {size_text(free)} free; "
            f"{variable} names another directory"
        )


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + INCOMPLETE)


def _receive(
    name: RepositoryName, commit: str, file: RemoteFile, progress: Progress, report: Callable[[int], None]
) -> None:
    """Download one file into the cache. The hub's answer to each request leads to where the bytes are, so that a link
    that expires meanwhile does no harm; the HTTP client sends the token to the hub alone."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    endpoint = environment("HF_ENDPOINT")
    folder = folder_of(name.repository)
    blob = folder / "blobs" / file.digest
    headers = build_hf_headers(library_name="luce", library_version=__version__) | {"Accept-Encoding": "identity"}
    url = hf_hub_url(name.repository, file.name, revision=commit, endpoint=endpoint)
    source = Source(file.name, url, headers, file.digest, file.size)
    if file.size > MOST_OVER_HTTP and not blob.exists():
        _receive_large(name, commit, source, progress, report)
        return
    receive(source, blob, _partial(blob), progress, report)
    _link(blob, folder / "snapshots" / commit / file.name)


def _receive_large(
    name: RepositoryName, commit: str, source: Source, progress: Progress, report: Callable[[int], None]
) -> None:
    """Download a file of more than MOST_OVER_HTTP bytes as the library does it, from its start, and check the bytes."""
    from huggingface_hub import hf_hub_download

    pointer = Path(
        hf_hub_download(
            name.repository,
            source.name,
            revision=commit,
            cache_dir=hugging_face_cache(),
            endpoint=environment("HF_ENDPOINT"),
            library_name="luce",
            library_version=__version__,
            tqdm_class=meter(report),
        )
    )
    try:
        check(source, pointer, progress)
    except ModelError:
        # The name in the snapshot, the blob, and where blobs are shared between repositories what the blob links to.
        for path in (pointer.resolve(), folder_of(name.repository) / "blobs" / source.digest, pointer):
            path.unlink(missing_ok=True)
        raise


def _link(blob: Path, pointer: Path) -> None:
    """Name a blob in a snapshot."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except FileExistsError:
        return
    except OSError:
        # A file system without links. The library moves the file, too.
        os.replace(blob, pointer)


def _write_ref(path: Path, commit: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    new.write_text(commit)
    os.replace(new, path)


@contextlib.contextmanager
def _translated(name: RepositoryName) -> Iterator[None]:
    """Turn errors of huggingface_hub into those of Luce: one line each, which says what the user can do."""
    from huggingface_hub import errors

    model, repository = f"model {str(name)!r}", name.repository
    hub = environment("HF_ENDPOINT") or "https://huggingface.co"
    try:
        with transport_errors(str(name), hub, hugging_face_cache()):
            yield
    except errors.HFValidationError as error:
        raise UsageError(f"{model}: {error}", param="model") from None
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{model}: {repository} is gated: accept its conditions at {hub}/{repository}, and {_LOGIN}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{model}: neither a file here nor a repository of the hub; if {repository} is private, {_LOGIN}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model}: {repository} has no revision {name.revision}") from error
    except errors.HfHubHTTPError as error:
        raise _refused(model, hub, error.response.status_code) from error


def _refused(model: str, hub: str, status: int) -> LuceError:
    """The error for an answer of the hub that has no class of its own."""
    if status == HTTPStatus.UNAUTHORIZED:
        return ModelError(f"{model}: {hub} asks for a token, or refuses the one that it got (401); {_LOGIN}")
    if status == HTTPStatus.FORBIDDEN:
        return ModelError(f"{model}: {hub} refuses this account the repository (403); {_LOGIN} of one that may read it")
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return UnreachableError(f"{model}: {hub} limits how much one may ask for (429); try again in some minutes")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return UnreachableError(f"{model}: {hub} answers {status_text(status)}; try again later")
    return ModelError(f"{model}: {hub} answers {status_text(status)}")
