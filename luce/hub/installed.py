"""The models on this machine: Luce's own, those of the hub's cache, and those of LM Studio and ollama, which Luce only
reads.

    ~/.cache/luce/models/FILE, ~/.cache/luce/models/HOST-ID/FILE                own
    models--ORG--REPO/snapshots/COMMIT/FILE                                     the hub's cache
    ~/.lmstudio/models/ORG/REPO/FILE                                            LM Studio
    ~/.ollama/models/manifests/HOST/NAMESPACE/NAME/TAG names blobs/sha256-...   ollama
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from luce.config.directories import hugging_face_cache
from luce.config.environment import environment
from luce.hub.names import RepositoryName
from luce.hub.packaged import ALIASES, own_directory
from luce.hub.repository import folder_of
from luce.hub.variants import Variant, by_preference, named, variants

Place = Literal["luce", "hub", "LM Studio", "ollama"]
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_HOST, _OLLAMA_NAMESPACE = "registry.ollama.ai", "library"


@dataclass(frozen=True)
class InstalledModel:
    """One model on this machine."""

    #: what MODEL takes: an alias, ORG/REPO:QUANT, or the path
    name: str
    #: who put it there
    place: Place
    #: the first part first
    files: tuple[Path, ...]
    #: bytes
    size: int
    #: seconds since the epoch
    modified: float
    #: what the other program calls it, if it has a name of its own
    title: str = ""


def installed() -> list[InstalledModel]:
    """All models, by place and name. What cannot be read is left out."""
    found = [*_own(), *_cached(), *_lm_studio(), *_ollama()]
    return sorted(found, key=lambda model: (model.place != "luce", model.place, model.name.lower()))


def find(name: RepositoryName) -> Path | None:
    """The file of a repository's model on this machine: in the hub's cache, where the newest commit counts, or in LM
    Studio's folder. None if it is not there. Without a quant the usual default of those that are there."""
    for folder in [*_snapshots(name.repository, name.revision), *(f / name.repository for f in _lm_studio_folders())]:
        there = variants(_sizes(folder))
        models = named(there, name.wanted) if name.wanted else by_preference(there)
        if models and (len(models) == 1 or not name.wanted):
            return folder / models[0].files[0]
    return None


def gguf_models(folder: Path) -> list[tuple[str, Path]]:
    """The models below a folder: a name, the path without its ending, and the first file."""
    found = []
    for model in variants(_sizes(folder)):
        stem = model.files[0][: -len(".gguf")]
        if len(model.files) > 1:
            stem = stem.rpartition("-of-")[0].rpartition("-")[0]
        found.append((re.sub(r"[\s,]+", "-", stem), folder / model.files[0]))
    return found


def _sizes(folder: Path) -> dict[str, int]:
    """GGUF files below a folder and their bytes."""
    found = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            if name.lower().endswith(".gguf") and path.is_file():
                found[str(path.relative_to(folder))] = path.stat().st_size
    return found


def _snapshots(repository: str, revision: str | None = None) -> list[Path]:
    """The snapshots of a repository in the hub's cache, the newest first; those of one revision only, if it is not the
    default branch."""
    folder = folder_of(repository)
    snapshots = folder / "snapshots"
    try:
        commits = sorted(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []
    default = revision in (None, RepositoryName.revision)
    try:
        current = (folder / "refs" / (revision or RepositoryName.revision)).read_text().strip()
    except OSError:
        current = "" if default else revision or ""
    first = [path for path in commits if path.name == current]
    return first + [path for path in commits if path.name != current and default]


def _models(folder: Path, repository: str, place: Place) -> Iterator[InstalledModel]:
    """The models in a folder that holds files of one repository."""
    there = variants(_sizes(folder))
    for model in there:
        alone = model.quant and sum(other.quant == model.quant for other in there) == 1
        name = f"{repository}:{model.quant if alone else model.files[0]}"
        yield _model(name, place, tuple(folder / file for file in model.files), model)


def _model(name: str, place: Place, files: tuple[Path, ...], model: Variant) -> InstalledModel:
    return InstalledModel(name, place, files, model.size, files[0].stat().st_mtime)


def _own() -> Iterator[InstalledModel]:
    folder = own_directory()
    aliases = {packaged.file: alias for alias, packaged in ALIASES.items()}
    for model in variants(_sizes(folder)):
        files = tuple(folder / file for file in model.files)
        yield _model(aliases.get(model.files[0], shortened(files[0])), "luce", files, model)


def _cached() -> Iterator[InstalledModel]:
    for folder in _directories(hugging_face_cache()):
        kind, *repository = folder.name.split("--")
        if kind != "models" or len(repository) != 2:
            continue
        seen: set[str] = set()
        for snapshot in _snapshots("/".join(repository)):
            for model in _models(snapshot, "/".join(repository), "hub"):
                if model.name not in seen:
                    seen.add(model.name)
                    yield model


def _lm_studio_folders() -> list[Path]:
    home = Path.home()
    folders = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    try:
        settings = json.loads((home / ".lmstudio" / "settings.json").read_text(encoding="utf-8"))
        folders.insert(0, Path(settings["downloadsFolder"]).expanduser())
    except (OSError, ValueError, TypeError, KeyError):
        pass  # not there, or of another version
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _lm_studio() -> Iterator[InstalledModel]:
    for folder in _lm_studio_folders():
        for organisation in _directories(folder):
            for repository in _directories(organisation):
                yield from _models(repository, f"{organisation.name}/{repository.name}", "LM Studio")


def _ollama() -> Iterator[InstalledModel]:
    given = environment("OLLAMA_MODELS")
    usual = [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    for folder in [Path(given).expanduser()] if given else usual:
        manifests = folder / "manifests"
        for path in sorted(manifests.glob("*/*/*/*")):
            try:
                layers = json.loads(path.read_text(encoding="utf-8"))["layers"]
                digest = next(layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL)
                blob = folder / "blobs" / Path(digest.replace(":", "-")).name
                facts = blob.stat()
            except (OSError, ValueError, TypeError, KeyError, StopIteration, AttributeError):
                continue
            host, namespace, name, tag = path.relative_to(manifests).parts
            prefix = [host] * (host != _OLLAMA_HOST) + [namespace] * (namespace != _OLLAMA_NAMESPACE)
            title = "/".join([*prefix, f"{name}:{tag}"])
            yield InstalledModel(shortened(blob), "ollama", (blob,), facts.st_size, facts.st_mtime, title)


def _directories(folder: Path) -> list[Path]:
    """The directories in a folder, by name; none if it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def shortened(path: Path) -> str:
    """A path with `~` for the home directory."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except ValueError:
        return str(path)
