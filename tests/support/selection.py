"""Which tests run: a pytest plugin that tests/conftest.py loads.

- Without a GPU, tests with the mark `gpu` are not collected.
- Tests whose results follow from the sources get the mark `provable`: those on the emulated device, and those in
  folders that tools/proofs.py names; a few others have it. `--skip-proved` leaves out those that passed with the
  present sources, as tools/proved.json says; `--prove` also adds files whose tests now pass to it.
- `--strict-skips` fails a skipped test whose reason ALLOWED_SKIPS does not name.

Processes of xdist take the files in the order of tests/support/spread.py.

It also keeps the collected tests out of the garbage collector's way, and loads the plugins that save time only.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from luce.runtime.found import found
from tests.support.observed import Observer
from tests.support.spread import spread
from tools import proofs

pytest_plugins = ["tests.support.kept_templates", "tests.support.shares", "tests.support.unsynced"]

#: Part of a test's id and part of its reason, of tests that may be skipped where --strict-skips is given.
ALLOWED_SKIPS = (
    ("tests/process/test_readme.py", "the sources are no git checkout"),
    ("tests/process/test_systemd.py", "no systemd can be booted here"),
    ("tests/process/test_ray", "RAY_TEST_PYTHON names no interpreter with Ray"),
    ("tests/clients/test_aider.py", "aider is not installed"),
    ("tests/golden/test_gemma3_270m.py", "LUCE_TEST_GEMMA3 names no file of Gemma 3 270M"),
    ("tests/golden/test_vocabularies.py", "LUCE_TEST_VOCABULARIES names no folder of vocabularies"),
)
#: marks of tests that only the nightly check runs, and that no proof needs
_NIGHTLY = ("slow", "repeated")
_PROVED = pytest.StashKey[list[str]]()
_PARTS = pytest.StashKey[set[str]]()


@cache
def gpu_present() -> bool:
    """Whether a CUDA or HIP device opens here."""
    return bool(found())


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("luce")
    group.addoption("--skip-proved", action="store_true", help="leave out provable tests that tools/proved.json names")
    group.addoption("--prove", action="store_true", help="as --skip-proved, and record what passes now")
    group.addoption("--strict-skips", action="store_true", help="fail on skips that tests/support/selection.py lacks")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--prove"):
        return
    # What is deselected shows; these leave tests out in silence.
    parts = (config.option.maxfail, getattr(config.option, "lf", False))
    if any(parts) or any("::" in arg for arg in config.args):
        raise pytest.UsageError("--prove: -x, --lf and single tests would prove a file by a part of its tests")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(), "luce-recorder")
    config.pluginmanager.register(Observer(), "luce-observer")


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [] if gpu_present() else ["no CUDA or HIP device: tests with the mark `gpu` are not collected"]
    if _skips_proved(config):
        lines.append(
            f"provable tests of {len(_proved(config))} files passed with these sources before, and are left out"
        )
    return lines


def proved() -> list[str]:
    """The files, named from the repository's root, whose provable tests passed with the present sources."""
    recorded = proofs.recorded("tests").items()
    return [name for name, digest in recorded if digest == proofs.test_digest(proofs.ROOT / name)]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    # The digests take seconds, in each process of xdist.
    if _skips_proved(node.config):
        node.workerinput["proved"] = _proved(node.config)


def _proved(config: pytest.Config) -> list[str]:
    if _PROVED not in config.stash:
        given = getattr(config, "workerinput", {}).get("proved")
        config.stash[_PROVED] = proved() if given is None else given
    return config.stash[_PROVED]


def _skips_proved(config: pytest.Config) -> bool:
    return bool(config.getoption("--skip-proved") or config.getoption("--prove"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # All its tests would be left out again: 8,000 of them cost each process of xdist 2 s. A file that the command line
    # names is not asked about.
    if not _skips_proved(config) or gpu_present() or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(proofs.ROOT).as_posix() if collection_path.is_relative_to(proofs.ROOT) else ""
    return True if proofs.provable(name) and name in _proved(config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = frozenset(_proved(config) if _skips_proved(config) else ())
    chosen, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {}).values()
        names = (*getattr(item, "fixturenames", ()), *(value for value in params if isinstance(value, str)))
        if any(name.startswith("emulated") for name in names):
            item.add_marker("emulated")
        of_gpu = item.get_closest_marker("gpu")
        if not of_gpu and (item.get_closest_marker("emulated") or proofs.provable(_file(item.nodeid))):
            item.add_marker("provable")
        again = item.get_closest_marker("provable") and _file(item.nodeid) in known
        (left_out if again or (of_gpu and not gpu_present()) else chosen).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        of_file = defaultdict[str, list[pytest.Item]](list)
        for item in chosen:
            of_file[_file(item.nodeid)].append(item)
        chosen = [item for file in spread([*of_file]) for item in of_file[file]]
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    # Modules and the 9,000 collected tests live until the end. Looking for garbage among them takes 2 of the 10 s of
    # CPU that each worker needs here, and later tests collect hundreds of times: in a few ms, not 460, without them.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    report: pytest.TestReport = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--strict-skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(part in item.nodeid and why in reason for part, why in ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: {reason}\nThis skip is not in ALLOWED_SKIPS of {Path(__file__).name}."
    return report


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("provable") and not any(map(item.get_closest_marker, _NIGHTLY)):
            item.config.stash.setdefault(_PARTS, set()).add(_file(item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput") and session.config.getoption("--prove"):
        session.config.workeroutput["luce_seen"] = seen(session.config)


def seen(config: pytest.Config) -> tuple[list[str], dict[str, list[str]]]:
    """The files a part of whose provable tests was chosen, and by file what was read that its digest does not cover."""
    observer = config.pluginmanager.getplugin("luce-observer")
    return sorted(config.stash.get(_PARTS, set())), {} if observer is None else observer.uncovered()


class Recorder:
    """Adds files all of whose provable tests passed to the record, at the end of a run."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = defaultdict(lambda: True)
        #: why files stay unproved whose tests passed
        self.why: dict[str, str] = {}
        self._complete = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "provable" in report.keywords:
            self.passed[_file(report.nodeid)] &= report.passed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        told = getattr(node, "workeroutput", {}).get("luce_seen")
        # A process that died has told nothing of what it read.
        self._complete &= told is not None
        self._note(*(told or ([], {})))

    def _note(self, parts: list[str], uncovered: dict[str, list[str]]) -> None:
        self.why |= dict.fromkeys(parts, "a part of its tests ran")
        for file, paths in uncovered.items():
            self.why[file] = f"its tests read {', '.join(paths[:5])}"

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._note(*seen(session.config))
        # A run that ended early knows of a part of a file's tests.
        if self._complete and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            files = [name for name, passed in self.passed.items() if passed and name not in self.why]
            proofs.record("tests", {name: proofs.test_digest(proofs.ROOT / name) for name in files})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._complete:
            terminalreporter.write_line("nothing is proved: a process of tests ended before it told what they read")
        for file in sorted(self.passed):
            if self.passed[file] and file in self.why:
                terminalreporter.write_line(f"not proved: {file}: {self.why[file]}")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
