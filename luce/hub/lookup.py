"""A model's name to its file, which is downloaded if needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from luce.errors import ModelError, NotDownloadedError, UnreachableError
from luce.hub import packaged, web_file
from luce.hub.installed import find
from luce.hub.names import RepositoryName, WebName, parse_name
from luce.hub.reporting import LoggedProgress, Progress, size_text
from luce.hub.repository import download, list_files
from luce.hub.variants import DeviceMemory, default, select, variants

_log = logging.getLogger("luce.hub")


def resolve_model(
    name: str,
    *,
    progress: Progress | None = None,
    memory: Callable[[], DeviceMemory | None] | None = None,
    fetch: bool = True,
    newest: bool = False,
) -> Path:
    """The file of a model, which is downloaded if needed; of a split one, the first.

    name: what luce.hub.names.parse_name takes. What is on this machine is used without asking the hub. progress:
    without it the log says what happens. memory: what the default quant of a repository has to fit. fetch: whether to
    download. newest: ask the hub for the newest commit of a repository even if the model is here; if the hub does not
    answer, what is here is used.

    Raises UsageError for a name that means nothing, or not one model; NotDownloadedError if the file is not here and
    `fetch` is false; UnreachableError if there is no network; and ModelError for a download that fails otherwise. A
    path is returned as it is, whether the file exists or not.
    """
    found = parse_name(name)
    if isinstance(found, Path):
        return found
    progress = progress or LoggedProgress()
    here = _here(found)
    if here is not None and not (newest and isinstance(found, RepositoryName)):
        return here
    if not fetch:
        raise NotDownloadedError(f"model {name!r} has not been downloaded yet")
    if isinstance(found, WebName):
        return web_file.download(found, progress)
    if isinstance(found, packaged.PackagedModel):
        return packaged.download(name, found, progress)
    try:
        return _download(found, memory, progress)
    except UnreachableError as error:
        if here is None:
            raise
        progress.note(f"{error}; the file that is here is used")
        return here


def _here(name: WebName | RepositoryName | packaged.PackagedModel) -> Path | None:
    """The file of a model if it is on this machine."""
    if isinstance(name, RepositoryName):
        return find(name)
    path = web_file.file_of(name) if isinstance(name, WebName) else packaged.file_of(name)
    return path if path.exists() else None


def _download(name: RepositoryName, memory: Callable[[], DeviceMemory | None] | None, progress: Progress) -> Path:
    """Download a model of a repository, or only what is missing of it."""
    listing = list_files(name, progress)
    models = variants({file.name: file.size for file in listing.files.values()})
    if not models:
        raise ModelError(f"model {str(name)!r}: {name.repository} has no GGUF file")
    if name.wanted:
        model = select(str(name), models, name.wanted)
    elif len(models) == 1:
        (model,) = models
    else:
        model, why = default(str(name), models, None if memory is None else memory())
        progress.note(f"{name}: takes {model.title} ({size_text(model.size)}): {why}")
    return download(name, listing, model.files, progress)
