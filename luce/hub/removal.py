"""Removes models, and what downloads that did not end have left."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

from luce.config.directories import hugging_face_cache
from luce.errors import ModelError, UsageError
from luce.hub import packaged, web_file
from luce.hub.installed import InstalledModel, installed
from luce.hub.names import RepositoryName, parse_name
from luce.hub.packaged import own_directory
from luce.hub.partial import INCOMPLETE
from luce.hub.variants import named, variants


def to_remove(name: str) -> InstalledModel:
    """The model that a name of `luce models` means. Raises UsageError if it is not here, if it is several, or if it
    belongs to another program."""
    models = installed()
    found = [model for model in models if _means(model, name)]
    removable = [model for model in found if model.place in ("luce", "hub")]
    if len(removable) == 1:
        return removable[0]
    if removable:
        names = ", ".join(model.name for model in removable)
        raise UsageError(f"luce rm {name}: these are several: {names}", param="model")
    if found:
        raise UsageError(
            f"luce rm {name}: {found[0].place} holds it, and Luce only reads its files: remove it there", param="model"
        )
    raise UsageError(f"luce rm {name}: not a model that Luce holds; `luce models` lists them", param="model")


def _means(model: InstalledModel, name: str) -> bool:
    """Whether `name` is this model's: as `luce models` shows it, its path, or what luce pull takes."""
    if name.lower() == model.name.lower() or Path(name).expanduser() in model.files:
        return True
    try:
        meant = parse_name(name)
    except UsageError:
        return False
    if isinstance(meant, RepositoryName):
        repository, _, _ = model.name.partition(":")
        files = [str(path) for path in model.files]
        inside = any(file.endswith(f"/{meant.wanted}") for file in files)
        return repository == meant.repository and (not meant.wanted or inside or _quant_is(model, meant.wanted))
    if isinstance(meant, Path):
        return False
    path = packaged.file_of(meant) if isinstance(meant, packaged.PackagedModel) else web_file.file_of(meant)
    return path in model.files


def _quant_is(model: InstalledModel, wanted: str) -> bool:
    return bool(named(variants({path.name: 0 for path in model.files}), wanted))


def remove(model: InstalledModel) -> None:
    """Remove a model's files. A process that has them open goes on. Raises ModelError if the files stay."""
    try:
        if model.place == "hub":
            _remove_cached(model)
            return
        for path in model.files:
            path.unlink()
            if path.parent != own_directory():
                path.parent.rmdir()
    except OSError as error:
        raise ModelError(f"luce rm {model.name}: {error.filename}: {error.strerror}") from error


def _remove_cached(model: InstalledModel) -> None:
    """Remove files from the hub's cache, at all commits, as its own library does."""
    from huggingface_hub import scan_cache_dir

    repository = model.name.partition(":")[0]
    path = model.files[0]
    snapshot = next(parent for parent in path.parents if parent.parent.name == "snapshots")
    names = {str(file.relative_to(snapshot)) for file in model.files}
    cache = scan_cache_dir(hugging_face_cache())
    held = [repo for repo in cache.repos if repo.repo_type == "model" and repo.repo_id == repository]
    revisions = [revision for repo in held for revision in repo.revisions]
    chosen = [
        file
        for revision in revisions
        for file in revision.files
        if str(file.file_path.relative_to(revision.snapshot_path)) in names
    ]
    if len(chosen) == sum(len(revision.files) for revision in revisions):
        cache.delete_revisions(*(revision.commit_hash for revision in revisions)).execute()
    else:
        cache.delete_files(*chosen).execute()
    left = next((file for file in model.files if file.exists()), None)
    if left is not None:
        raise ModelError(f"luce rm {model.name}: {left} could not be removed")


def incomplete() -> Iterator[Path]:
    """What downloads have left that did not end; nothing of those that run."""
    blobs = hugging_face_cache().glob(f"models--*/blobs/*{INCOMPLETE}")
    for path in sorted([*blobs, *own_directory().rglob(f"*{INCOMPLETE}")]):
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                yield path
        except OSError:
            continue  # a process downloads it, or has ended just now
