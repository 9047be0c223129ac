"""tools/dependencies.py: what a file depends on, as its source text says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import dependencies

#: modules of a repository; `cli` has three verbs
MODULES = {
    "luce/__init__.py": "x = 1\ndef __getattr__(name):\n    from luce import assembly\n    return assembly.load",
    "luce/__main__.py": "from luce.cli.ending import script\nscript()",
    "luce/assembly.py": "def load(): pass",
    "luce/cli/__init__.py": "",
    "luce/cli/ending.py": "from luce.cli.main import main\ndef script(): main()",
    "luce/cli/main.py": "import importlib\nimport luce.cli.streams\n"
    "def main(argv=None): importlib.import_module(f'luce.cli.{argv[0]}')",
    "luce/cli/streams.py": "",
    "luce/cli/shard.py": "import luce.ops",
    "luce/cli/serve.py": "",
    "luce/cli/plan.py": "",
    "luce/ops/__init__.py": "",
    "luce/ops/norm.py": "",
    "luce/ops/rope.py": "",
    "luce/deep.py": "import luce.deeper",
    "luce/deeper.py": "",
    "luce/model_cards/card.json": "",
    "tests/support/__init__.py": "",
    "tests/support/lazy.py": "import importlib\ndef lazy(name): return importlib.import_module(name)",
    "tests/reference/a.gguf": "",
    "tools/bench.py": "",
    "docs/page.md": "",
    "README.md": "",
    "LICENSE": "",
}
#: the command line without its verbs
COMMAND_LINE = {f"cli/{name}" for name in ("__init__", "ending", "main", "streams")} | {"__main__", "__init__"}
SHARD = COMMAND_LINE | {"cli/shard", "ops/__init__"}
VERBS = SHARD | {"cli/serve", "cli/plan"}
OPS = {"__init__", "ops/__init__", "ops/norm", "ops/rope"}
LAZY = {"tests/support/__init__", "tests/support/lazy"}
ALL = {name.removeprefix("luce/").removesuffix(".py") for name in MODULES if name.endswith(".py")}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository of these modules, in place of this one."""
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)
    dependencies.forget()
    yield tmp_path
    dependencies.forget()


def found(root: Path, text: str, place: str = "tests/test_it.py") -> set[str]:
    """What a module with a text depends on, without itself; those of Luce by their names in it."""
    (root / place).write_text(text)
    names = {path.relative_to(root).as_posix() for path in dependencies.dependencies([root / place])} - {place}
    return {name.removeprefix("luce/").removesuffix(".py") for name in names}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", set()),
        ("import luce.deep", {"__init__", "deep", "deeper"}),
        ("def f():\n  if x:\n    from luce import deeper", {"__init__", "deeper"}),
        ("try:\n  pass\nexcept E:\n  import luce.deeper", {"__init__", "deeper"}),
        ("class A:\n  def __getattr__(self, name):\n    import luce.deeper", {"__init__", "deeper"}),
        ("from luce.ops import norm as n, absent", {"__init__", "ops/__init__", "ops/norm"}),
        ("from luce.ops.norm import *", {"__init__", "ops/__init__", "ops/norm"}),
        # Types are of no consequence, what runs without them is.
        ("if TYPE_CHECKING:\n  import luce.deep\nelse:\n  import luce.deeper", {"__init__", "deeper"}),
        ("if not TYPE_CHECKING:\n  import luce.deeper", {"__init__", "deeper"}),
        # What `luce` imports late.
        ("import luce\nluce.x", {"__init__"}),
        ("import luce\nluce.load()", {"__init__", "assembly"}),
        ("import luce.ops\nluce.load()", {"__init__", "ops/__init__", "assembly"}),
        ("import luce\nf(luce)", {"__init__", "assembly"}),
        ("import luce as l\nl.load()", {"__init__", "assembly"}),
        ("from luce import load", {"__init__", "assembly"}),
        ("from luce import *", {"__init__", "assembly"}),
        # Names in strings.
        ("patch('luce.ops.norm.run', 1)", {"__init__", "ops/__init__", "ops/norm"}),
        ("f(__import__('luce.deeper'))", {"__init__", "deeper"}),
        ("CODE = 'import sys; from luce import deeper; deeper.f({0})'", {"__init__", "deeper"}),
        ("CODE = f'from luce.ops import norm, rope\\nprint({x})'", OPS),
        ("import_module(f'luce.ops.{name}')", OPS),
        ("runpy.run_path('tools/bench.py')", {"tools/bench"}),
        ("run([ROOT / 'tools' / 'bench.py'])", {"tools/bench"}),
        ("from tests.support.lazy import lazy\nlazy('luce.deeper')", LAZY | {"__init__", "deeper"}),
        # What cannot be told.
        ("import_module(name)", ALL),
        ("importlib.import_module(f'{name}.py')", ALL),
        ("exec(text)", ALL),
        ("runpy.run_path(path)", ALL),
        ("run([python, '-m', module])", ALL),
        ("network.eval()", set()),
        # Commands.
        ("run([python, '-P', '-m', 'luce', 'shard', *more])", SHARD),
        ("run(python, '-m', 'luce', 'shard')", SHARD),
        ("run((python, '-m', 'luce', *more))", VERBS),
        ("run([python, '-m', 'luce', verb])", VERBS),
        ("run([python, '-m', 'luce.ops.norm'])", {"__init__", "ops/__init__", "ops/norm"}),
        ("from luce.cli.main import main\nmain(['shard', '--x'])", SHARD),
        ("from luce.cli.main import main as luce\nluce(['shard'])", SHARD),
        ("from luce.cli.main import main\nmain(['shard'])\nmain(words)", VERBS),
        ("from luce.cli.main import main\nmain(['shard'])\nf(main)", VERBS),
        ("import luce.cli.main", VERBS),
        ("import luce.cli.ending", VERBS),
        ("from luce.cli import main\nrun(['-m', 'luce', 'shard'])\nmain.main(x)", VERBS),
        ("from luce.cli.main import main as m\nimport luce.cli.main\nm(['shard'])", VERBS),
        ("CODE = \"from luce.cli.main import main\\nmain(['shard', *sys.argv])\"", SHARD),
        ("CODE = 'from luce.cli.main import main\\nmain(sys.argv)'", VERBS),
        # Data.
        ("open(HERE / 'reference' / name)", {"tests/reference/a.gguf"}),
        ("open('tests/reference/a.gguf')", {"tests/reference/a.gguf"}),
        ("import luce\nCARDS = resources.files('luce') / 'model_cards'", {"__init__", "model_cards/card.json"}),
        ("(ROOT / 'README.md').read_text()", {"README.md"}),
        ("(ROOT / 'LICENSE').read_text()", {"LICENSE"}),
        ("(ROOT / 'docs').glob(pattern)", {"docs/page.md"}),
    ],
)  # fmt: skip
def test_what_a_text_depends_on(root: Path, text: str, expected: set[str]) -> None:
    assert found(root, text) == expected


def test_imports_are_relative_to_the_package(root: Path) -> None:
    assert found(root, "from . import rope\nfrom .. import deeper\nfrom ..cli.plan import x", "luce/ops/it.py") == {
        *("__init__", "ops/__init__", "ops/rope", "deeper", "cli/__init__", "cli/plan")
    }


def test_what_only_uncovered_modules_need_is_left_out(root: Path) -> None:
    module = root / "tests" / "test_it.py"
    module.write_text("import luce.deep")
    assert root / "luce" / "deeper.py" not in dependencies.dependencies([module], [root / "luce" / "deep.py"])


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("'Says.'", "'Says more.'", True),
        ("# why", "# why so", True),
        ("pass", "return", False),
        ("'Says.'", "'Says.' + x", False),
        ("B = 1", "B = 2", False),
    ],
)
def test_code_is_what_runs(root: Path, old: str, new: str, same: bool) -> None:
    text = "B = 1\ndef f():\n    'Says.'\n    # why\n    pass\n"
    module = root / "luce" / "deep.py"
    codes = set()
    for each in (text, text.replace(old, new)):
        module.write_text(each)
        dependencies.forget()
        codes.add(dependencies.source(module).code)
    assert (len(codes) == 1) == same


def test_docstrings_count_where_they_are_read(root: Path) -> None:
    module, codes = root / "luce" / "deep.py", set()
    for text in ("'one'\nx = __doc__", "'two'\nx = __doc__"):
        module.write_text(text)
        dependencies.forget()
        codes.add(dependencies.source(module).code)
    assert len(codes) == 2


ERRORS = """
LIMIT = 1
class Base(Exception): pass
class Mid(Base): pass
class Leaf(Mid): pass
class Other(Base):
    def f(self): return helper()
def helper(): return LIMIT
"""


@pytest.mark.parametrize(
    ("user", "old", "covered"),
    [
        ("from luce.deep import Leaf", "class Leaf(Mid): pass", True),
        ("from luce.deep import Leaf", "class Base(Exception): pass", True),
        ("from luce.deep import Leaf", "LIMIT = 1", True),
        ("from luce.deep import Leaf", "return helper()", False),
        ("from luce.deep import Leaf", "return LIMIT", False),
        ("from luce.deep import Other", "return LIMIT", True),
        ("from luce.deep import Other", "class Leaf(Mid): pass", False),
        ("from luce import deep", "class Leaf(Mid): pass", True),
        ("import luce.deep", "class Leaf(Mid): pass", True),
        ("from luce.deep import *", "class Leaf(Mid): pass", True),
        ("patch('luce.deep.Leaf')", "class Leaf(Mid): pass", True),
    ],
)
def test_the_parts_of_a_module_that_are_used(root: Path, user: str, old: str, covered: bool) -> None:
    module, using = root / "luce" / "deep.py", root / "tests" / "test_it.py"
    using.write_text(user)
    texts = set()
    for text in (
        ERRORS,
        ERRORS.replace(old, old.replace("pass", "x = 1").replace("return", "yield").replace("1", "2")),
    ):
        module.write_text(text)
        dependencies.forget()
        part = dependencies.parts(module, [using])
        texts.add(text if part is None else part)
    assert (len(texts) == 2) == covered


def test_the_way_from_one_file_to_another(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "tests" / "test_it.py").write_text("import luce.deep")
    names = [str(root / name) for name in ("tests/test_it.py", "luce/deeper.py")]
    assert dependencies.main(names) == 0
    assert capsys.readouterr().out.splitlines() == ["tests/test_it.py", "luce/deep.py", "luce/deeper.py"]
    assert dependencies.main([names[1], names[0]]) == 0 and capsys.readouterr().out == ""
    assert dependencies.main(names[:1]) == 0 and len(capsys.readouterr().out.splitlines()) == 4
    assert dependencies.main([]) == 2
