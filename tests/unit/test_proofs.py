"""tools/proofs.py and the pytest plugin that goes by it: what a proof covers, and which tests run without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import selection
from tools import build_kernels, proofs

#: a run of the plugin alone
INI = """
[pytest]
asyncio_default_fixture_loop_scope = function
markers =
    emulated: of the emulated device
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


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository of a few files, in place of this one."""
    files = {
        "luce/__init__.py": "def __getattr__(name):\n    import luce.lazy\n",
        "luce/lazy.py": "",
        "luce/used.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import luce.typed\n"
        "def f():\n    from luce import deep\n",
        "luce/deep.py": "import luce.used",
        "luce/typed.py": "",
        "luce/other.py": "",
        "kernels/norm.cu": "",
        "kernels/gpu.h": "",
        "tests/conftest.py": "import luce.fixtures",
        "luce/fixtures.py": "",
        "tests/reference/a.npz": "",
        "tests/support/emulator.cpp": "",
        "tests/test_it.py": 'import luce.errors\nimport luce.used\n\ndef test_it():\n    "Says."\n    # why\n    pass',
        "luce/errors.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
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
        ("luce/other.py", False),
        ("luce/typed.py", False),
        ("luce/lazy.py", False),
        ("luce/errors.py", False),
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


def test_what_is_left_out_exists() -> None:
    assert all((proofs.ROOT / name).is_file() for name in proofs.UNCOVERED)


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
    for part in (["-k", "kernel"], ["-x"], ["--deselect", f"{file}::test_other"]):
        assert pytester.runpytest_inprocess("-p", "tests.support.selection", *here, "--prove", *part).ret == 4


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
