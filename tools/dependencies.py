"""Which files of this repository a Python file depends on, as its source text says.

Its imports are followed, wherever they stand, and so is whatever else brings a module in:

- names of modules and files in strings (`"luce.ipc.child"`, `"tests/support/warm.py"`), imports in strings of code, and
  the start of a name that an f-string completes, which stands for all that begins so;
- `-m MODULE` of a command, and with `luce` its verb, for `luce.cli.VERB` and what `luce.cli.main` needs;
- the verb with which `luce.cli.main.main` is called, and `luce.load`, which `luce/__init__.py` imports late.

What cannot be told from the text depends on everything: a name that is computed, code that is executed, a verb that a
variable holds. Folders and files of data count by their names in strings. Only imports for types count nowhere.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: the top-level packages of this repository
PACKAGES = ("luce", "tests", "tools")
#: folders with files of data
DATA = (*PACKAGES, "docs", "kernels", "models", "systemd")
#: what every module that something cannot be told of depends on
EVERYTHING = ("luce", "tests/support", "tools")
#: modules that import what a verb names: whoever names it depends on it
COMMAND_LINE = ("luce/__main__.py", "luce/cli/ending.py", "luce/cli/main.py")
#: their names
_RUNS = ("luce.__main__", "luce.cli.ending", "luce.cli.main")
#: modules that import or execute what those who use them have in a string
BY_NAME = (*COMMAND_LINE, "tests/support/lazy.py", "tests/support/warm.py")
#: functions that import or execute what their first argument says
_DYNAMIC = {"import_module", "__import__", "exec", "eval", "run_module", "run_path", "spec_from_file_location"}
_DOTTED = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_STARTED = re.compile(rf"\b((?:{'|'.join(PACKAGES)})(?:\.\w+)*)\.$")
_FROM = re.compile(rf"\bfrom\s+((?:{'|'.join(PACKAGES)})(?:\.\w+)*)\s+import\s+(\w+(?:\s*,\s*\w+)*)")
_FILE = re.compile(r"\w+\.py\b")
_PATH = re.compile(r"[\w.*/-]+")
#: in code of a string, the verb of a command line
_VERB = re.compile(r"\bmain\(\[['\"](\w+)['\"]")
#: a command line's verb that is not known
ANY = "*"


@dataclass(slots=True)
class Source:
    """What one file says."""

    #: SHA-256 of its code
    code: str = ""
    #: dotted names that it imports or mentions
    names: set[str] = field(default_factory=set)
    #: dotted names of packages whose modules it may all import
    within: set[str] = field(default_factory=set)
    #: names of Python files that it mentions
    files: set[str] = field(default_factory=set)
    #: words of its strings, among which are names of files of data
    words: set[str] = field(default_factory=set)
    #: the verbs of command lines that it runs
    verbs: set[str] = field(default_factory=set)
    #: what a module's `__getattr__` imports, and the names that are there without it
    late: Source | None = None
    bound: set[str] = field(default_factory=set)
    #: whether it imports what its text does not say
    unknown: bool = False


def dependencies(modules: Iterable[Path], uncovered: Iterable[Path] = ()) -> set[Path]:
    """Python files and what they need of this repository, directly or through others, Python and data; without
    `uncovered` and what only these need."""
    found, words = set[Path](), set[str]()
    waiting, left_out = [*modules], {*uncovered}
    while waiting:
        path = waiting.pop()
        if path not in found and path not in left_out:
            found.add(path)
            waiting += needed(path)
            words |= source(path).words
    return found | {file for names, file in _data() if names & words}


def parts(path: Path, users: Iterable[Path]) -> str | None:
    """The code of the top-level classes and functions of a module that its users name, and of what these name there;
    other statements count in any case. None if a user may mean all of the module."""
    prefix = _relative(path.with_suffix("")).replace("/", ".")
    named = {name for user in users if user.suffix == ".py" and user != path for name in source(user).names}
    if {prefix, f"{prefix}.*"} & named:
        return None
    tree = ast.parse(path.read_bytes())
    _undocument(tree)
    found = {name.split(".")[prefix.count(".") + 1] for name in named if name.startswith(f"{prefix}.")}
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    waiting: list[ast.stmt] = [node for node in tree.body if getattr(node, "name", "") not in defined]
    kept = [ast.dump(node) for node in waiting]
    waiting += [defined[name] for name in found & {*defined}]
    while waiting:
        inner = {node.id for node in ast.walk(waiting.pop()) if isinstance(node, ast.Name)} & {*defined}
        waiting += [defined[name] for name in inner - found]
        found |= inner
    return "\n".join([*kept, *(ast.dump(node) for name, node in defined.items() if name in found)])


@cache
def needed(path: Path) -> frozenset[Path]:
    """The Python files that a file needs directly."""
    said = source(path)
    if said.unknown and _relative(path) not in BY_NAME:
        return frozenset(file for folder in EVERYTHING for file in (ROOT / folder).rglob("*.py"))
    found = {file for name in said.names for file in _places(name)}
    within = () if _relative(path) in COMMAND_LINE else said.within
    found |= {file for name in within for file in ROOT.joinpath(*name.split(".")).rglob("*.py")}
    found |= {file for name in said.files for file in _by_file_name().get(name, ())}
    if _relative(path) not in COMMAND_LINE:
        started = found & {ROOT / name for name in COMMAND_LINE}
        verbs = said.verbs or ({ANY} if started else set())
        found |= {file for verb in verbs for file in _verb(verb)}
    return frozenset(found - {path})


@cache
def source(path: Path) -> Source:
    """What a file says."""
    text = path.read_bytes()
    tree = ast.parse(text)
    # Docstrings do nothing, unless something reads them for more than a help.
    if not re.search(rb"(?<!description=)__doc__", text):
        _undocument(tree)
    said = Source(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), bound=_bound(tree))
    _Reader(said, _relative(path.parent).replace("/", ".")).read(tree)
    return said


class _Reader:
    """Reads a module's tree into a Source."""

    def __init__(self, said: Source, package: str) -> None:
        self.said = said
        self.package = package
        #: what `luce.cli.main.main` is called here
        self.commands: set[str] = set()
        #: the names of packages that stand for these here
        self.packages: set[str] = set()
        #: those of `commands` that are called with a verb
        self.told: set[ast.expr] = set()
        self.handlers: dict[type[ast.AST], Callable[[Any], None]] = {
            ast.Import: self._import,
            ast.ImportFrom: self._import_from,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.List: lambda node: self._command(node.elts),
            ast.Tuple: lambda node: self._command(node.elts),
            ast.JoinedStr: self._joined,
            ast.Constant: lambda node: self._string(node.value) if isinstance(node.value, str) else None,
        }

    def read(self, tree: ast.Module) -> None:
        """Read a whole module."""
        for node in _statements(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "luce.cli.main":
                self.commands |= {alias.asname or alias.name for alias in node.names}
            if isinstance(node, ast.Import):
                self.packages |= {alias.name.partition(".")[0] for alias in node.names} & {*PACKAGES}
                for alias in node.names:
                    self.said.names |= {f"{alias.name}.*"} if alias.asname else set()
        outer = self.said
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
                self.said = outer.late = outer.late or Source()
            self._node(node)
            self.said = outer

    def _node(self, node: ast.AST) -> None:
        handler = self.handlers.get(type(node))
        if handler is not None:
            handler(node)
        typing = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for name in node._fields:
            value = getattr(node, name, None)
            # What an attribute is of has been read with it.
            if isinstance(value, ast.Name) and isinstance(node, ast.Attribute):
                continue
            if isinstance(value, ast.AST):
                self._node(value)
            elif isinstance(value, list) and not (typing and name == "body"):
                for child in value:
                    if isinstance(child, ast.AST):
                        self._node(child)

    def _import(self, node: ast.Import) -> None:
        self._imported({alias.name for alias in node.names})

    def _imported(self, names: set[str]) -> None:
        self.said.names |= names
        if any(name == part or name.startswith(f"{part}.") for name in names for part in _RUNS):
            self.said.verbs.add(ANY)

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            above = self.package.split(".")
            module = ".".join([*above[: len(above) - node.level + 1], *filter(None, [module])])
        names = {f"{module}.{alias.name}" for alias in node.names}
        if module == "luce.cli.main":
            # What is called with which verb shows where it is called.
            self.said.names |= names
        else:
            self._imported(names)

    def _name(self, node: ast.Name) -> None:
        if node.id in self.packages:
            # Passed on: whatever of it may be meant.
            self.said.names.add(f"{node.id}.*")
        if node.id in self.commands and node not in self.told:
            self.said.verbs.add(ANY)

    def _attribute(self, node: ast.Attribute) -> None:
        names, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self.packages:
            self.said.names.add(".".join([inner.id, *reversed(names)]))

    def _call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        first = node.args[0] if node.args else None
        if name in _DYNAMIC and (isinstance(node.func, ast.Name) or name not in ("exec", "eval", "compile")):
            start = first.values[0] if isinstance(first, ast.JoinedStr) else None
            self.said.unknown |= _text(first) is None and not _STARTED.search(_text(start) or "")
        if name in self.commands and isinstance(first, ast.List) and first.elts and _text(first.elts[0]):
            self.told.add(node.func)
            self.said.verbs.add(_text(first.elts[0]) or ANY)
        self._command(node.args)

    def _joined(self, node: ast.JoinedStr) -> None:
        for value in node.values[:-1]:
            started = _STARTED.search(_text(value) or "")
            if started:
                self.said.within.add(started[1])

    def _command(self, words: list[ast.expr]) -> None:
        """The module that a command runs."""
        texts = [_text(word) for word in words]
        if "-m" not in texts[:-1]:
            return
        place = texts.index("-m") + 1
        module = texts[place]
        if module is None:
            self.said.unknown = True
        elif module == "luce":
            self.said.names.add("luce.__main__")
            self.said.verbs.add((texts[place + 1] if place + 1 < len(texts) else None) or ANY)
        else:
            self.said.names |= {module, f"{module}.__main__"}

    def _string(self, text: str) -> None:
        said = self.said
        if _PATH.fullmatch(text):
            said.words |= {*text.split("/")}
        if ".py" in text:
            said.files |= {*_FILE.findall(text)}
        if "import" in text:
            found = [(module, re.split(r"\s*,\s*", names)) for module, names in _FROM.findall(text)]
            said.names |= {f"{module}.{name}" for module, names in found for name in names}
            if any(module.startswith("luce.cli.main") for module, _ in found):
                verbs = _VERB.findall(text)
                said.verbs |= {*verbs} if len(verbs) == text.count("main(") else {ANY}
        said.names |= {*_DOTTED.findall(text)}


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@cache
def _places(name: str) -> tuple[Path, ...]:
    """The files that an import of a dotted name executes."""
    parts, found = name.split("."), list[Path]()
    if parts[0] not in PACKAGES:
        return ()
    for end in range(1, len(parts) + 1):
        place = ROOT.joinpath(*parts[:end])
        files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
        found += files
        late = source(files[0]).late if files and end < len(parts) else None
        if late is not None and parts[end] not in source(files[0]).bound and not _is_module(place / parts[end]):
            for other in late.names:
                found += _places(other)
        if not files and not place.is_dir():
            break
    return tuple(found)


def _is_module(place: Path) -> bool:
    return place.with_suffix(".py").is_file() or place.is_dir()


def _verb(verb: str) -> Iterator[Path]:
    """The files that a command line needs, by its verb."""
    for name in COMMAND_LINE:
        if (ROOT / name).is_file():
            yield ROOT / name
    module = ROOT / "luce" / "cli" / f"{verb}.py"
    yield from [module] if module.is_file() else (ROOT / "luce" / "cli").rglob("*.py")


@cache
def _by_file_name() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found.setdefault(path.name, []).append(path)
    return found


@cache
def _data() -> tuple[tuple[frozenset[str], Path], ...]:
    """Files of data, each with the names of which a string may have one: its own, and those of its folders."""
    paths = (path for folder in DATA for path in (ROOT / folder).rglob("*") if path.is_file())
    own = [path for path in paths if path.suffix not in (".py", ".pyc")]
    own += [path for path in ROOT.glob("[!.]*") if path.is_file()]
    return tuple((_names(path), path) for path in own)


def _names(path: Path) -> frozenset[str]:
    if path.name == "README.md":
        return frozenset({path.name})
    folders = (folder for folder in path.relative_to(ROOT).parents if not (ROOT / folder / "__init__.py").is_file())
    return frozenset({path.name, *(folder.name for folder in folders if folder.name)} - {*PACKAGES})


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _bound(tree: ast.Module) -> set[str]:
    """The names that a module's own statements bind, without those within `if`."""
    bound = {"__file__", "__name__", "__path__"}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.Assign):
            bound |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound.add(node.target.id)
    return bound


def _undocument(tree: ast.Module) -> None:
    """Take the docstrings out of a tree. Comments and white space are in no tree."""
    for node in (tree, *_statements(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """A tree's statements, at any depth."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            # No expression has a statement within.
            if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
                yield node
                waiting.append(node)


def forget() -> None:
    """Read files again that have changed since."""
    for cached in (source, needed, _places, _by_file_name, _data):
        cached.cache_clear()


def way(start: Path, end: Path) -> list[Path]:
    """The shortest chain of Python files from one to another, each of which needs the next; empty without one."""
    ways, waiting = {start: [start]}, deque([start])
    while waiting and end not in ways:
        path = waiting.popleft()
        for other in sorted(needed(path) - ways.keys()):
            ways[other] = [*ways[path], other]
            waiting.append(other)
    return ways.get(end, [])


def main(arguments: list[str]) -> int:
    """Print what a file depends on."""
    if len(arguments) not in (1, 2):
        print(__doc__)
        return 2
    start, *end = (Path(argument).resolve() for argument in arguments)
    for path in way(start, *end) if end else sorted(dependencies([start])):
        print(_relative(path))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
