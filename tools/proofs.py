"""Kernel builds and tests on the emulated device that need no second run while their sources are unchanged.

They take most of the suite's time and have one result for one state of the sources. `tools/proved.json` holds, for each
kernel source and each test file, the digest of the sources with which its builds or its emulated tests last passed.
`tools/check` and `tools/build_kernels --ci` leave out those whose digest is still the same; `tools/check --prove` and
`tools/build_kernels --ci --prove` run the others and write the new digests, to be committed with the change.
`tools/check --nightly` and the builds without `--ci` run everything.

A test file's digest covers the modules of this repository that it imports, directly or through others, the conftest
files above it, all kernels, the emulator and the reference files. Of a module it covers the code, not comments and
docstrings. A kernel source's digest covers the source, all headers, its builds and their targets. Compilers and
packages from elsewhere are not covered, nor is UNCOVERED: that is what the nightly run is for.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tools" / "proved.json"
#: the top-level packages of this repository
PACKAGES = ("luce", "tests", "tools")
#: modules that most tests import and that compute nothing of a kernel's result: each new status of the server, setting,
#: format of tool calls or allowed skip would take all proofs away
UNCOVERED = (
    "luce/errors.py",
    "luce/config/settings.py",
    "luce/models/calls.py",
    "luce/models/channels.py",
    "luce/models/tool_formats.py",
    "tests/support/selection.py",
    "tools/proofs.py",
)

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
    """The digest of all that the emulated tests of a file depend on."""
    conftests = (folder / "conftest.py" for folder in module.parents if folder.is_relative_to(ROOT / "tests"))
    starts = [module, *(path for path in conftests if path.is_file())]
    return digest((*dependencies(starts), *_data()))


def dependencies(modules: Iterable[Path]) -> set[Path]:
    """The modules and what they import of this repository, directly or through others, without UNCOVERED."""
    found, waiting, uncovered = set[Path](), [*modules], {ROOT / name for name in UNCOVERED}
    while waiting:
        path = waiting.pop()
        if path not in found | uncovered:
            found.add(path)
            waiting += _module(path)[0]
    return found


@cache
def _module(path: Path) -> tuple[tuple[Path, ...], str]:
    """The files of this repository that a module imports, and the SHA-256 of its code."""
    tree = ast.parse(path.read_bytes())
    names = {name for node in _statements(tree, _is_executed) for name in _names(node)}
    parts = (name.split(".") for name in sorted(names))
    places = {ROOT.joinpath(*part[:end]) for part in parts if part[0] in PACKAGES for end in range(1, len(part) + 1)}
    files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
    code = ast.dump(_undocumented(tree)).encode()
    return tuple(file for file in sorted(files) if file.is_file()), hashlib.sha256(code).hexdigest()


def _statements(tree: ast.AST, entered: Callable[[ast.AST], bool]) -> Iterator[ast.AST]:
    """A tree's statements, at any depth, without those that are not to be entered and what is within these."""
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            # No expression has a statement within.
            if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case) and entered(node):
                yield node
                waiting.append(node)


def _is_executed(node: ast.AST) -> bool:
    """Whether `import` executes a statement: what is under `if TYPE_CHECKING` and in a module's `__getattr__` not."""
    typing = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return not typing and not (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


@cache
def _data() -> tuple[Path, ...]:
    places = ((ROOT / "kernels", "*.cu"), (ROOT / "kernels", "*.h"), (ROOT / "tests" / "support", "*.c*"))
    reference = (path for path in (ROOT / "tests" / "reference").rglob("*") if path.is_file())
    return (*(path for folder, pattern in places for path in folder.glob(pattern)), *reference)


@cache
def _content(path: Path) -> str:
    return _module(path)[1] if path.suffix == ".py" else hashlib.sha256(path.read_bytes()).hexdigest()


def _undocumented(tree: ast.Module) -> ast.Module:
    """The tree without docstrings. Comments and white space are in no tree."""
    for node in (tree, *_statements(tree, lambda _: True)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return tree


def forget() -> None:
    """Read files again that have changed since their digest was taken."""
    for cached in (_module, _data, _content):
        cached.cache_clear()
