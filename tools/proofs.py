"""Kernel builds and tests that need no second run while their sources are unchanged.

They take most of the suite's time and have one result for one state of the sources. `tools/proved.json` holds, for each
kernel source and each test file, the digest of the sources with which its builds or its provable tests last passed.
`tools/check` and `tools/build_kernels --ci` leave out those whose digest is still the same; `tools/check --prove` and
`tools/build_kernels --ci --prove` run the others and write the new digests, to be committed with the change.
`tools/check --nightly` and the builds without `--ci` run everything.

Provable are tests on the emulated device, all in FOLDERS, and those with that mark. A test file's digest covers what it
depends on as its sources say (tools/dependencies.py), modules and data, the conftest files above it, and PLUGINS. Of a
module it covers the code, not comments and docstrings. A kernel source's digest covers the source, all headers, its
builds and their targets. Compilers and packages from elsewhere are not covered, but for PYTHON, nor is UNCOVERED: that
is what the nightly run is for. While a file is proved, tests/support/observed.py looks whether its digest covers what
it reads.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from tools import dependencies

ROOT = dependencies.ROOT
RECORD = ROOT / "tools" / "proved.json"
#: folders all of whose tests have results that follow from the sources alone
FOLDERS = ("tests/golden", "tests/ops", "tests/contracts")
#: what chooses tests and has no part in their results: each new skip that is allowed would take all proofs away
UNCOVERED = (
    "tests/support/selection.py",
    "tests/support/observed.py",
    "tests/support/spread.py",
    "tools/dependencies.py",
    "tools/proofs.py",
)
#: plugins that selection.py loads, by what they change: `""` is every test
PLUGINS = {"tests/support/unsynced.py": "", "tests/support/kept_templates.py": "luce/text/open.py"}
#: modules of classes and functions that have nothing to do with one another, where most have one to add
PARTS = ("luce/errors.py",)
#: packages whose minor versions results depend on, where they are imported
PYTHON = ("numpy", "numba", "torch", "transformers")

Kind = Literal["builds", "tests"]


def recorded(kind: Kind) -> dict[str, str]:
    """The recorded digests by kernel source or test file; empty without a record."""
    if not RECORD.is_file():
        return {}
    found: dict[str, dict[str, str]] = json.loads(RECORD.read_text())
    return found.get(kind, {})


def record(kind: Kind, digests: dict[str, str]) -> None:
    """Add digests to the record; entries of files that no longer exist go."""
    found: dict[Kind, dict[str, str]] = {"builds": recorded("builds"), "tests": recorded("tests")}
    found[kind] |= digests
    found["tests"] = {name: value for name, value in found["tests"].items() if (ROOT / name).is_file()}
    found["builds"] = {n: v for n, v in found["builds"].items() if (ROOT / "kernels" / f"{n}.cu").is_file()}
    ordered = {name: dict(sorted(entries.items())) for name, entries in found.items()}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n")


def digest(paths: Iterable[Path], *texts: str) -> str:
    """SHA-256 over names and contents of files below the repository's root, and over texts."""
    total = hashlib.sha256(repr(texts).encode())
    for path in sorted(set(paths)):
        total.update(f"{path.relative_to(ROOT)} {_content(path)}\n".encode())
    return total.hexdigest()[:32]


def test_digest(module: Path) -> str:
    """The digest of all that the provable tests of a file depend on."""
    found = covered(module)
    # Of these the code that is used: a new error of the server would take all proofs away.
    used = {ROOT / name: dependencies.parts(ROOT / name, found) for name in PARTS if ROOT / name in found}
    texts = {path: text for path, text in used.items() if text is not None}
    return digest(found - texts.keys(), *texts.values(), *_versions(found))


def covered(module: Path) -> set[Path]:
    """The files of this repository that the digest of a test file covers."""
    conftests = (folder / "conftest.py" for folder in module.parents if folder.is_relative_to(ROOT / "tests"))
    starts = [module, *(path for path in conftests if path.is_file())]
    uncovered = {ROOT / name for name in UNCOVERED}
    found = dependencies.dependencies(starts, uncovered)
    plugins = [ROOT / name for name, changed in PLUGINS.items() if not changed or ROOT / changed in found]
    return dependencies.dependencies([*starts, *filter(Path.is_file, plugins)], uncovered)


def provable(name: str) -> bool:
    """Whether all tests of a file, named from the repository's root, are provable."""
    return name.startswith(tuple(f"{folder}/" for folder in FOLDERS))


def _versions(files: Iterable[Path]) -> list[str]:
    """The minor versions of Python and of those of PYTHON that files import."""
    said = [dependencies.source(path) for path in files if path.suffix == ".py"]
    imported = {name.partition(".")[0] for source in said for name in source.names} | {
        word for source in said for word in source.words
    }
    return [f"python {sys.version_info[:2]}", *(_version(name) for name in PYTHON if name in imported)]


@cache
def _version(name: str) -> str:
    try:
        return f"{name} {'.'.join(metadata.version(name).split('.')[:2])}"
    except metadata.PackageNotFoundError:
        return f"no {name}"


def _content(path: Path) -> str:
    return dependencies.source(path).code if path.suffix == ".py" else _contents(path)


@cache
def _contents(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forget() -> None:
    """Read files again that have changed since their digest was taken."""
    dependencies.forget()
    for cached in (_contents, _version):
        cached.cache_clear()
