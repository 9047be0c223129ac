"""The map in luce/__init__.py held against the code: imports point down, packages are packaged, one reader of the
environment."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import luce
from luce.models.registry import FAMILIES
from tests.support.layering import FLOW

ROOT = Path(__file__).parents[2]
BESIDE = {"models": {"gguf"}, "gguf": set(), "hub": set()}
UNDER = {"config", "decoders", "errors", "log"}
FAMILY = re.compile(rf"(?<![a-z0-9])({'|'.join(FAMILIES)})(?![a-z0-9])", re.IGNORECASE)
SOURCES = sorted((ROOT / "luce").rglob("*.py"))


@dataclass(frozen=True)
class Module:
    """What the tests below look at in a module of Luce."""

    path: Path
    imported: set[str]
    #: the lines that read the environment
    reading: list[int]
    #: words outside docstrings that name a family
    families: list[str]
    #: what is beyond the limits, by line, and the lines that give a reason for it
    large: dict[int, str]
    reasons: set[int]


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    """All of them for each test: thousands of tests would cost more than what they look at. Of a tree that is kept, the
    garbage collector would look at each node."""
    return [module(path, ast.parse(path.read_text())) for path in SOURCES]


def module(path: Path, tree: ast.Module) -> Module:
    lines = path.read_text().splitlines()
    # An exception has its reason in place: `# size: why` behind the def, or on a line of its own for the module.
    reasons = {number for number, line in enumerate(lines, 1) if re.search(r"\S +# size: \w{3,}", line)}
    reasons |= {1 for line in lines if re.match(r"# size: \w{3,}", line)}
    large = too_large(tree, len(lines))
    return Module(path, imported(tree), environment_reads(tree), family_names(tree), large, reasons)


def part(module: str) -> str:
    """`luce.engine.loop` is part `engine`."""
    return [*module.split("."), ""][1]


def docstring(node: ast.AST) -> ast.AST | None:
    """The node of a module's, class's or function's docstring."""
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    return first.value if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else None


def imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "luce":
            names = [f"luce.{alias.name}" for alias in node.names] if node.module == "luce" else [node.module]
            found.update(names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "luce")
    return {part(name) for name in found} - {"", "__version__"}


def points_down(own: str, other: str) -> bool:
    """Whether a part may import another one."""
    if own in UNDER:
        return other in UNDER
    if own in BESIDE:
        return other in UNDER or other in BESIDE[own]
    return other in UNDER or other in BESIDE or (other in FLOW and FLOW.index(other) > FLOW.index(own))


def test_imports_point_down(modules: list[Module]) -> None:
    wrong = []
    for module in modules:
        own = part(".".join(module.path.relative_to(ROOT).with_suffix("").parts))
        if own not in ("__init__", "__main__"):
            others = module.imported - {own}
            wrong += [f"{module.path}: imports {other}" for other in others if not points_down(own, other)]
    assert wrong == []


def environment_reads(tree: ast.Module) -> list[int]:
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [node.lineno for node in attributes if node.attr in ("environ", "getenv")]


def test_environment_is_read_in_config_only(modules: list[Module]) -> None:
    reading = {str(module.path.relative_to(ROOT)): module.reading for module in modules if module.reading}
    assert reading.pop("luce/config/environment.py") and reading == {}


def family_names(tree: ast.Module) -> list[str]:
    docstrings = {docstring(node) for node in ast.walk(tree)}
    nodes = (node for node in ast.walk(tree) if node not in docstrings)
    words = [value for node in nodes for _, value in ast.iter_fields(node) if isinstance(value, str)]
    # One search, as a family's name does not go over the end of a line.
    return [word for word in words if FAMILY.search(word)] if FAMILY.search("\n".join(words)) else []


def test_families_are_named_by_models_only(modules: list[Module]) -> None:
    named = {module.path.relative_to(ROOT / "luce"): module.families for module in modules if module.families}
    # The tokenizer's names are values of tokenizer.ggml.model and tokenizer.ggml.pre; some sound like a family's.
    named.pop(Path("text/tokenizer.py"), None)
    assert {path: names for path, names in named.items() if path.parts[0] != "models"} == {}


def executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that importing a module executes: none of a function, none for type checkers."""
    for node in body:
        typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if typing or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        for inner in ("body", "orelse", "handlers", "finalbody"):
            yield from executed(getattr(node, inner, []))


def test_every_module_imports_alone() -> None:
    # A circular import shows only when its second module is imported first. Without a circle every order works, and
    # other tests import each module in some order.
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in SOURCES}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = {name.rpartition(".")[0]}
        for node in executed(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
                imported.update(f"{node.module}.{alias.name}" for alias in node.names)
        graph[name] = imported & modules.keys()
    assert sum(len(found) for found in graph.values()) > 4 * len(modules)
    # Raises CycleError, which names the circle.
    TopologicalSorter(graph).prepare()


def test_the_architecture_page_is_the_map() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)` \| (.+) \|$", page, re.MULTILINE)
    assert rows == re.findall(r"^    ([\w/]+) +(.+)$", luce.__doc__ or "", re.MULTILINE)
    assert [name for name, _ in rows] == [*FLOW, "kernels/"]


#: lines of a function and of a module, and parameters of a constructor beside self
LONGEST_FUNCTION, LONGEST_MODULE, MOST_PARAMETERS = 70, 500, 8


def too_large(tree: ast.Module, lines: int) -> dict[int, str]:
    """What of a module is beyond the limits, by the line at which it begins."""
    found = {1: f"the module has {lines} lines"} if lines > LONGEST_MODULE else {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or 0) - node.lineno + 1
        arguments = node.args
        parameters = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
        if length > LONGEST_FUNCTION:
            found[node.lineno] = f"{node.name} has {length} lines"
        if node.name == "__init__" and parameters > MOST_PARAMETERS:
            found[node.lineno] = f"{node.name} has {parameters} parameters; options objects count as one"
    return found


def test_functions_constructors_and_modules_are_short(modules: list[Module]) -> None:
    for module in modules:
        assert {line: what for line, what in module.large.items() if line not in module.reasons} == {}, module.path
        assert module.reasons <= module.large.keys(), f"{module.path}: these are within the limits by now"


#: names that several modules share, and what each of these modules is
SHARED_NAMES = {
    "altup": "AltUp: the op and the layer",
    "attention": "attention: the op and the layer",
    "backend": "the package, and its protocol",
    "bench": "the package, and its verb",
    "cache": "the prefix cache: its endpoint and its verb",
    "chat": "a conversation: as text and as a verb",
    "cluster": "the package, and its verb",
    "daemon": "the daemon's side: of shards and of drafters",
    "deltanet": "gated DeltaNet: the op and the layer",
    "device": "a device: of this process and of another one",
    "dflash": "DFlash: its keys in a file, and its drafter",
    "drafter": "a drafter: the protocol and DFlash's",
    "errors": "the error tree, and its HTTP bodies",
    "dynamic_conv": "the grouped dynamic convolution: the op and the layer",
    "features": "what a drafter reads of its target: the op and the layer",
    "fingerprint": "what tells files or models apart",
    "messages": "what server and daemon send: about layers, about drafters",
    "models": "families of models as data, and the verb that lists files of models",
    "moe": "a mixture of experts: the op and the layer",
    "norm": "norms: the op, and the norm of a layer's rows",
    "open": "opens what the settings name: devices here, devices in daemons, drafters",
    "page_ranking": "how much attention pages get: the op, and the statistics of a shard",
    "ray": "the package, and its verb",
    "reader": "reads a file: a model's and a snapshot's",
    "remote": "the package of shards, and a drafter, in another process: the server's side",
    "sampling": "the table of sampling values, and the choice of tokens",
    "saved_state": "saved state: of a shard here, and of one in a daemon",
    "short_conv": "the gated short convolution: the op and the layer",
    "service": "what a daemon holds for its server, and the verb that installs a systemd service",
    "shard": "the package, the protocol, the remote side and the verb",
    "spec": "a model as data: of a family, of a drafter and of a DFlash draft",
    "state": "state shared by many: of the server's handlers, and of a layer's sequences",
}


def test_modules_share_a_name_only_with_a_meaning() -> None:
    names = [path.stem if path.name != "__init__.py" else path.parent.name for path in SOURCES]
    shared = {name for name in names if names.count(name) > 1} - {"luce"}
    assert shared - SHARED_NAMES.keys() == set(), "give each idea one word, or say here what they share"
    assert SHARED_NAMES.keys() - shared == set(), "these names are unique by now"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_of_the_documentation_lead_somewhere() -> None:
    pages = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(p for top in ("docs", "kernels", "luce", "models") for p in (ROOT / top).rglob("*.md")),
    ]
    linked = {}
    for page in pages:
        linked[page] = set()
        for link, anchor in re.findall(r"\]\(([^)#: ]*)(?:#([^)]*))?\)", page.read_text()):
            target = (page.parent / link).resolve() if link else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target), f"{page}: {link}#{anchor}"
            linked[page].add(target)
    index = ROOT / "docs" / "README.md"
    assert set(pages) <= linked[index] | {index}, "the index leads to every page"


def test_package_list_is_complete() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in SOURCES}
    assert listed == found | {"luce.kernels", "luce.systemd"}


def test_installed_wheel_finds_its_kernels_and_its_web_ui(tmp_path: Path) -> None:
    # A copy, so that neither this tree's old build products get in nor new ones are left in it.
    tree, place = tmp_path / "tree", tmp_path / "place"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "tests", "build", "*.egg-info"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-cache-dir",
        # By the setuptools that is here; tools/check_release builds in environments of their own.
        "--no-build-isolation",
        "--no-compile",
        "--target",
        str(place),
        str(tree),
    ]
    subprocess.run(command, check=True, capture_output=True)
    code = "from luce.runtime import kernels; print(kernels.directory()); print(*kernels.sources()); "
    code += "from luce.server.static_files import static_files; print(*static_files())"
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(place)!r}); {code}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    assert Path(found[0]) == place / "luce" / "kernels"
    assert found[1].split() == sorted(p.stem for p in (ROOT / "kernels").glob("*.cu"))
    web = ROOT / "luce/server/webui"
    assert sorted(found[2].split()) == sorted(p.relative_to(web).as_posix() for p in web.rglob("*") if p.is_file())
    assert {p.name for p in (ROOT / "kernels").glob("*.h")} <= {p.name for p in Path(found[0]).iterdir()}
