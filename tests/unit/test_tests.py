"""The tests themselves: they reach into no private names, and import nothing from each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("*.py"))
PRIVATE = re.compile(r"(?:^|\.)_[^_.][^.]*$")
#: public names of the standard library that begin with an underscore
PUBLIC = {"_exit", "_replace", "_asdict", "_fields"}


@pytest.fixture(scope="module")
def found() -> dict[Path, tuple[set[str], set[str]]]:
    """The private names and the modules of tests that each module of tests uses. Each test goes over all modules: a
    thousand tests would cost more than what they look at."""
    trees = ((path, ast.parse(path.read_text())) for path in FILES)
    return {path: (set(private_names(tree)) - PUBLIC, set(imported(tree))) for path, tree in trees}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names of others: attributes of what is neither self nor cls, imports, and names for monkeypatch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if PRIVATE.match(alias.name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in ("setattr", "getattr", "delattr"):
                texts = (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
                yield from (text.rpartition(".")[2] for text in texts if PRIVATE.search(text))


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of tests outside tests/support that are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"tests\.(?!support\b)", node.module or ""):
            yield node.module or ""


def test_tests_reach_into_no_private_names(found: dict[Path, tuple[set[str], set[str]]]) -> None:
    assert {path: names for path, (names, _) in found.items() if names} == {}


def test_tests_import_nothing_from_each_other(found: dict[Path, tuple[set[str], set[str]]]) -> None:
    assert {path: modules for path, (_, modules) in found.items() if modules} == {}


def test_tools_import_nothing_from_tests() -> None:
    found = [
        f"{path}: {name}"
        for path in (ROOT / "tools").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [])
        + ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        if name and name.partition(".")[0] == "tests"
    ]
    assert found == []


@pytest.mark.parametrize(
    "code, found",
    [
        ("thing._secret", {"_secret"}),
        ("self._own; cls._own; thing.__dict__", set()),
        ("from luce.api import _within", {"_within"}),
        ("monkeypatch.setattr(module, '_LIMIT', 3)", {"_LIMIT"}),
        ("monkeypatch.setattr('luce.api._LIMIT', 3)", {"_LIMIT"}),
    ],
)
def test_private_names_are_found(code: str, found: set[str]) -> None:
    assert set(private_names(ast.parse(code))) == found


def test_lazy_modules_are_imported_where_they_are_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(costly="VALUE = 3")
    pytester.makepyfile(
        """
        import sys
        import pytest
        from tests.support.lazy import Lazy

        costly = Lazy("costly")

        @pytest.mark.parametrize("module", [costly])
        def test_collected(module):
            assert "costly" not in sys.modules

        def test_used():
            assert costly.VALUE == 3 and "costly" in sys.modules
        """
    )
    pytester.syspathinsert()
    pytester.runpytest_inprocess("-p", "no:asyncio").assert_outcomes(passed=2)
