"""tools/proofs.py and the pytest plugin that goes by it: what a proof covers, and which tests run without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from luce.cli import main
from tests.support import selection
from tools import build_kernels, dependencies, proofs

#: a run of the plugin alone
INI = """
[pytest]
asyncio_default_fixture_loop_scope = function
markers =
    emulated: of the emulated device
    provable: has a result that follows from the sources
    slow: of many minutes
    gpu: of a GPU
"""

TESTS = """
import pytest
import luce

@pytest.mark.emulated
def test_kernel():
    assert {kernel}

def test_other():
    assert True
"""


@cache
def golden() -> frozenset[str]:
    """What the proof of a file of tests/golden covers."""
    found = proofs.covered(proofs.ROOT / "tests" / "golden" / "test_kvflash.py")
    return frozenset(path.relative_to(proofs.ROOT).as_posix() for path in found)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository of a few files, in place of this one."""
    files = {
        "luce/__init__.py": "def __getattr__(name):\n    import luce.lazy\n",
        "luce/text/open.py": "",
        "luce/lazy.py": "",
        "luce/used.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import luce.typed\n"
        "def f():\n    from luce import deep\n",
        "luce/deep.py": "import luce.used",
        "luce/typed.py": "",
        "luce/other.py": "",
        "kernels/norm.cu": "",
        "kernels/gpu.h": "",
        "luce/cards/a.json": "",
        "tests/conftest.py": "import luce.fixtures\npytest_plugins = ['tests.support.selection']",
        "luce/fixtures.py": "",
        "tests/reference/a.npz": "",
        "tests/support/emulator.cpp": "",
        "tests/support/selection.py": "import luce.other",
        "tests/support/unsynced.py": "import luce.syncing",
        "luce/syncing.py": "",
        "tests/support/kept_templates.py": "",
        "tests/test_it.py": "from luce.errors import UsedError\nimport luce.used\n"
        "PLACES = ('kernels', 'reference', 'emulator.cpp', 'cards')\n\n"
        'def test_it():\n    "Says."\n    # why\n    pass',
        "luce/errors.py": "class UsedError: pass",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for module in (proofs, dependencies):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(proofs, "RECORD", tmp_path / "proved.json")
    proofs.forget()
    yield tmp_path
    proofs.forget()


@pytest.mark.parametrize(
    ("changed", "covered"),
    [
        ("tests/test_it.py", True),
        ("luce/used.py", True),
        ("luce/deep.py", True),
        ("luce/__init__.py", True),
        ("tests/conftest.py", True),
        ("luce/fixtures.py", True),
        ("kernels/norm.cu", True),
        ("kernels/gpu.h", True),
        ("tests/support/emulator.cpp", True),
        ("tests/reference/a.npz", True),
        ("luce/cards/a.json", True),
        ("tests/support/unsynced.py", True),
        ("luce/syncing.py", True),
        ("tests/support/selection.py", False),
        ("tests/support/kept_templates.py", False),
        ("luce/other.py", False),
        ("luce/typed.py", False),
        ("luce/lazy.py", False),
        ("luce/errors.py", True),
    ],
)
def test_a_proof_covers_what_a_test_imports(tree: Path, changed: str, covered: bool) -> None:
    before = proofs.test_digest(tree / "tests" / "test_it.py")
    with (tree / changed).open("a") as file:
        file.write("\nchanged = 1\n")
    proofs.forget()
    assert (proofs.test_digest(tree / "tests" / "test_it.py") != before) == covered


@pytest.mark.parametrize(
    ("old", "new", "covered"), [("Says", "Says more", False), ("# why", "# why so", False), ("pass", "assert 1", True)]
)
def test_a_proof_covers_code_and_not_what_is_said_about_it(tree: Path, old: str, new: str, covered: bool) -> None:
    file = tree / "tests" / "test_it.py"
    before = proofs.test_digest(file)
    file.write_text(file.read_text().replace(old, new))
    proofs.forget()
    assert (proofs.test_digest(file) != before) == covered


def test_a_plugin_is_covered_where_what_it_changes_is(tree: Path) -> None:
    file = tree / "tests" / "test_it.py"
    plugin = tree / "tests" / "support" / "kept_templates.py"
    assert plugin not in proofs.covered(file)
    file.write_text("import luce.text.open")
    proofs.forget()
    assert plugin in proofs.covered(file)


def test_a_class_of_an_error_is_covered_where_it_is_used(tree: Path) -> None:
    errors, file, digests = tree / "luce" / "errors.py", tree / "tests" / "test_it.py", list[str]()
    for text in ("class UsedError: pass", "class UsedError: pass\nclass NewError: pass", "class UsedError: status = 1"):
        errors.write_text(text)
        proofs.forget()
        digests.append(proofs.test_digest(file))
    assert digests[0] == digests[1] != digests[2]


def test_a_proof_is_of_the_versions_of_what_is_imported(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, versions = tree / "tests" / "test_it.py", {"numpy": "2.4.1", "numba": "0.68.0", "torch": "3.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)

    def digest() -> str:
        proofs.forget()
        return proofs.test_digest(file)

    file.write_text("import numpy as np\nTORCH = Lazy('torch')")
    first = digest()
    versions |= {"numpy": "2.4.2", "numba": "0.69.0"}
    assert digest() == first
    versions["torch"] = "3.1"
    assert (second := digest()) != first
    versions["numpy"] = "2.5.0"
    assert digest() != second
    monkeypatch.setattr(sys, "version_info", (3, 99))
    assert digest() not in (first, second)


def test_what_is_left_out_exists() -> None:
    names = (*proofs.UNCOVERED, *proofs.PARTS, *proofs.PLUGINS, *filter(None, proofs.PLUGINS.values()))
    assert all((proofs.ROOT / name).is_file() for name in names)
    assert all((proofs.ROOT / name).is_dir() for name in proofs.FOLDERS)


def test_a_proof_of_tokens_covers_what_computes_them() -> None:
    for name in (
        "luce/assembly.py", "luce/engine/loop.py", "luce/layers/attention.py", "luce/models/qwen35.py",
        "luce/ops/matmul.py", "luce/cpu_kernels/attention.py", "luce/runtime/host.py", "luce/config/settings.py",
        # in other processes
        "luce/cli/shard.py", "luce/remote/daemon.py", "luce/text/template_process.py",
        "luce/model_cards/qwen3-4b.json", "tests/reference/cohere2-a-F32.gguf", "kernels/matmul_vec.cu",
        "tests/conftest.py", "tests/golden/conftest.py", "tests/support/warm.py", "tests/support/kept_templates.py",
        "tests/support/unsynced.py",
    ):  # fmt: skip
        assert name in golden(), name
    assert not any(name.endswith("README.md") for name in golden())


@pytest.mark.parametrize("package", ["server", "ray", "cluster", "bench"])
def test_a_proof_of_tokens_covers_nothing_that_serves(package: str) -> None:
    assert not [name for name in golden() if name.startswith(f"luce/{package}/")]


def test_a_proof_of_tokens_covers_the_daemons_part_of_the_command_line() -> None:
    names = {Path(name).stem for name in golden() if name.startswith("luce/cli/")}
    assert names & main.VERBS.keys() == {"shard", "pull"}


@pytest.mark.parametrize("name", ["luce/ops/matmul.py", "luce/models/qwen3.py", "luce/engine/sampling.py"])
def test_a_mutation_takes_the_proof_of_tokens_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read, module = proofs.ROOT / "tests" / "golden" / "test_kvflash.py", Path.read_bytes, proofs.ROOT / name
    before, said = proofs.test_digest(file), dependencies.source(module)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: read(path).replace(b"    return ", b"    return not ", 1))
        mutated = dependencies.source.__wrapped__(module)
    monkeypatch.setattr(said, "code", mutated.code)
    assert proofs.test_digest(file) != before


def test_the_record_holds_both_kinds_and_forgets_files_that_went(tree: Path) -> None:
    assert proofs.recorded("tests") == {}
    proofs.record("tests", {"tests/test_it.py": "1", "tests/test_gone.py": "2"})
    proofs.record("builds", {"norm": "3", "gone": "4"})
    proofs.record("tests", {})
    assert proofs.recorded("tests") == {"tests/test_it.py": "1"} and proofs.recorded("builds") == {"norm": "3"}


def test_a_build_is_proved_for_its_source_headers_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    target = build_kernels.TARGETS[0]
    norm, rope = build_kernels.KernelBuild("norm"), build_kernels.KernelBuild("rope")
    both = build_kernels.digests([(norm, target), (rope, target)])
    assert build_kernels.digests([(rope, target), (norm, target)]) == both
    assert build_kernels.digests([(norm, target)]) == {"norm": both["norm"]} and both["norm"] != both["rope"]
    assert build_kernels.digests([(norm, build_kernels.TARGETS[1])])["norm"] != both["norm"]
    assert build_kernels.digests([(norm, target), (build_kernels.KernelBuild("norm", (("A", "1"),)), target)]) != both


def test_ci_builds_only_what_is_not_proved(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build_all(tasks: list, jobs: int, *, keep: bool = False) -> list[build_kernels.Result]:
        built[:] = sorted({build.source for build, _ in tasks})
        return [build_kernels.Result(b, t, 0.0, error="no" if b.source == "rope" else None) for b, t in tasks]

    monkeypatch.setattr(build_kernels, "missing", lambda name: None)
    monkeypatch.setattr(build_kernels, "build_all", build_all)
    for name in ("norm", "rope"):
        (tree / "kernels" / f"{name}.cu").write_text("")
    names = build_kernels.kernels.sources()
    monkeypatch.setattr(proofs, "digest", lambda paths, *texts: "same")
    assert build_kernels.main(["--ci", "--prove"]) == 1 and built == names
    assert build_kernels.main(["--ci", "--skip-proved"]) == 1 and built == [n for n in names if n != "norm"]
    assert build_kernels.main(["--ci"]) == 1 and built == names


def run(pytester: pytest.Pytester, *arguments: str) -> dict[str, int]:
    return pytester.runpytest_inprocess("-p", "tests.support.selection", *arguments).parseoutcomes()


def test_emulated_tests_run_until_they_are_proved(tree: Path, pytester: pytest.Pytester) -> None:
    file = tree / "tests" / "test_it.py"
    (tree / "tests" / "conftest.py").write_text("")
    (tree / "pytest.ini").write_text(INI)
    both, other = {"passed": 2}, {"passed": 1, "deselected": 1}
    file.write_text(TESTS.format(kernel=True))
    here = ("--rootdir", str(tree), "-c", str(tree / "pytest.ini"), str(file))
    assert run(pytester, *here, "--skip-proved") == both
    assert run(pytester, *here, "--prove") == both
    assert run(pytester, *here, "--skip-proved") == other and run(pytester, *here) == both
    # A change takes the proof away, and a failure gives none.
    file.write_text(TESTS.format(kernel=False))
    proofs.RECORD.unlink()
    proofs.forget()
    for _ in range(2):
        assert run(pytester, *here, "--prove") == {"passed": 1, "failed": 1}
    assert proofs.recorded("tests") == {}
    for part in (["-x"], ["--lf"], [f"{file}::test_other"]):
        assert pytester.runpytest_inprocess("-p", "tests.support.selection", *here, "--prove", *part).ret == 4


PARTS = """
import pytest

def test_a(): pass

@pytest.mark.slow
def test_b(): assert 0

@pytest.mark.gpu
def test_c(): assert 0
"""


@pytest.fixture
def here(tree: Path) -> tuple[str, ...]:
    """The arguments of a run of the tests in that repository's tests/golden/test_it.py."""
    (tree / "tests" / "conftest.py").write_text("")
    (tree / "pytest.ini").write_text(INI)
    (tree / "tests" / "golden").mkdir()
    (tree / "tests" / "golden" / "test_it.py").write_text(PARTS)
    return "--rootdir", str(tree), "-c", str(tree / "pytest.ini"), str(tree / "tests" / "golden" / "test_it.py")


def test_all_tests_of_a_folder_are_provable(here: tuple[str, ...], pytester: pytest.Pytester) -> None:
    assert run(pytester, *here, "-m", "not slow", "--prove") == {"passed": 1, "deselected": 2}
    assert [*proofs.recorded("tests")] == ["tests/golden/test_it.py"]
    assert run(pytester, *here, "-m", "not slow", "--skip-proved") == {"deselected": 3}
    # What a proof is not of, no proof leaves out.
    assert run(pytester, *here, "-m", "gpu", "--skip-proved") == {"deselected": 3}


@pytest.mark.parametrize("gpu", [True, False])
def test_proved_files_of_a_folder_are_collected_where_there_is_a_gpu(
    here: tuple[str, ...], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    *options, file = here
    run(pytester, *here, "-m", "not slow", "--prove")
    monkeypatch.setattr(selection, "gpu_present", lambda: gpu)
    folder = str(Path(file).parent)
    assert run(pytester, *options, folder, "-m", "not slow", "--skip-proved") == (
        {"failed": 1, "deselected": 2} if gpu else {}
    )
    # Without a proof, and where proofs do not count, all is collected.
    assert run(pytester, *options, folder, "-m", "not slow and not gpu") == {"passed": 1, "deselected": 2}
    Path(file).write_text(f"{PARTS}# changed\nVALUE = 1\n")
    proofs.forget()
    assert run(pytester, *options, folder, "-m", "not slow and not gpu", "--skip-proved") == {
        "passed": 1,
        "deselected": 2,
    }


def test_a_gpu_test_runs_whatever_is_proved(
    here: tuple[str, ...], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(pytester, *here, "-m", "not slow", "--prove")
    monkeypatch.setattr(selection, "gpu_present", lambda: True)
    assert run(pytester, *here, "-m", "gpu", "--skip-proved") == {"failed": 1, "deselected": 2}


@pytest.mark.parametrize(
    "part", [["-m", "emulated"], ["-k", "test_a"], ["--deselect", "tests/golden/test_it.py::test_a"]]
)
def test_a_part_of_a_files_tests_proves_nothing(
    tree: Path, here: tuple[str, ...], pytester: pytest.Pytester, part: list[str]
) -> None:
    with (tree / "tests" / "golden" / "test_it.py").open("a") as file:
        file.write("\n@pytest.mark.emulated\ndef test_d(): pass\n")
    result = pytester.runpytest_inprocess("-p", "tests.support.selection", *here, "-m", "not slow", *part, "--prove")
    result.stdout.fnmatch_lines(["not proved: tests/golden/test_it.py: a part of its tests ran"])
    assert proofs.recorded("tests") == {}


def test_a_skipped_test_proves_nothing(tree: Path, here: tuple[str, ...], pytester: pytest.Pytester) -> None:
    (tree / "tests" / "golden" / "test_it.py").write_text("import pytest\ndef test_a(): pytest.skip()")
    run(pytester, *here, "--prove")
    assert proofs.recorded("tests") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(ROOT / ('luce/oth' + 'er.py')).read_text()", "luce/other.py"),
        ("import sys; sys.path.insert(0, str(ROOT)); import luceother", "luceother.py"),
        ("import subprocess, sys; subprocess.run([sys.executable, str(ROOT / ('luce' + 'other.py'))])", "luceother.py"),
        ("(ROOT / 'luce' / 'errors.py').read_text()", ""),
        ("Path(__file__).read_text()", ""),
        ("import xml.dom.minidom", ""),
        ("Path('/proc/self/stat').read_text()", ""),
    ],
)
def test_what_is_read_and_not_covered_proves_nothing(
    tree: Path, here: tuple[str, ...], pytester: pytest.Pytester, text: str, said: str
) -> None:
    (tree / "luceother.py").write_text("")
    file = tree / "tests" / "golden" / "test_it.py"
    file.write_text(f"from pathlib import Path\nROOT = Path({str(tree)!r})\ndef test_a():\n    {text}\n")
    result = pytester.runpytest_inprocess("-p", "tests.support.selection", *here, "--prove")
    assert [*proofs.recorded("tests")] == ([] if said else ["tests/golden/test_it.py"])
    if said:
        result.stdout.fnmatch_lines([f"not proved: tests/golden/test_it.py: its tests read *{said}"])


def report(file: str, outcome: str = "passed") -> SimpleNamespace:
    return SimpleNamespace(nodeid=f"{file}::test", keywords={"provable": 1}, passed=outcome == "passed")


@pytest.mark.parametrize("died", [False, True])
def test_what_other_processes_have_seen_counts(
    died: bool, tree: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(selection, "seen", lambda config: ([], {}))
    recorder = selection.Recorder()
    for name in ("a", "b", "c", "d"):
        (tree / "tests" / f"{name}.py").write_text("")
        recorder.pytest_runtest_logreport(report(f"tests/{name}.py"))  # type: ignore[arg-type]
    recorder.pytest_runtest_logreport(report("tests/d.py", "failed"))  # type: ignore[arg-type]
    recorder.pytest_testnodedown(SimpleNamespace(workeroutput={"luce_seen": (["tests/a.py"], {})}))
    recorder.pytest_testnodedown(SimpleNamespace(workeroutput={"luce_seen": ([], {"tests/b.py": ["/x"]})}))
    if died:
        recorder.pytest_testnodedown(SimpleNamespace())
    recorder.pytest_sessionfinish(SimpleNamespace(config=pytestconfig), pytest.ExitCode.OK)  # type: ignore[arg-type]
    assert [*proofs.recorded("tests")] == ([] if died else ["tests/c.py"])


def test_a_skip_that_is_not_on_the_list_fails(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeini(INI)
    pytester.makepyfile(test_a="import pytest\ndef test_b(): pytest.skip('no tool')\ndef test_c(): pass\n")
    assert run(pytester) == {"passed": 1, "skipped": 1}
    assert run(pytester, "--strict-skips") == {"passed": 1, "failed": 1}
    monkeypatch.setattr(selection, "ALLOWED_SKIPS", (("test_a.py::test_b", "no tool"),))
    assert run(pytester, "--strict-skips") == {"passed": 1, "skipped": 1}
    monkeypatch.setattr(selection, "ALLOWED_SKIPS", (("test_a.py::test_b", "another reason"),))
    assert run(pytester, "--strict-skips") == {"passed": 1, "failed": 1}


@pytest.mark.parametrize("present", [True, False])
def test_gpu_tests_are_collected_where_there_is_a_gpu(
    present: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "gpu_present", lambda: present)
    pytester.makeini(INI)
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_a(): pass\ndef test_b(): pass\n")
    assert run(pytester) == ({"passed": 2} if present else {"passed": 1, "deselected": 1})
