"""Which tests run: a pytest plugin that tests/conftest.py loads.

- Without a GPU, tests with the mark `gpu` are not collected.
- `--skip-proved` leaves out emulated tests that passed with the present sources, as tools/proved.json says;
  `--prove` also adds those that now pass to it (tools/proofs.py).
- `--strict-skips` fails a skipped test whose reason ALLOWED_SKIPS does not name.

It also keeps the collected tests out of the garbage collector's way, and loads the plugins that save time only.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from luce.runtime.open import found
from tools import proofs

pytest_plugins = ["tests.support.kept_templates", "tests.support.unsynced"]

#: Part of a test's id and part of its reason, of tests that may be skipped where --strict-skips is given.
ALLOWED_SKIPS = (
    ("tests/golden/test_draft_reference.py::test_explicit_flag", "the flag changes nothing of this draft"),
    ("tests/process/test_readme.py", "the sources are no git checkout"),
    ("tests/process/test_systemd.py", "no systemd can be booted here"),
    ("tests/process/test_cluster_", "network namespaces cannot be made here"),
    ("tests/process/test_ray", "RAY_TEST_PYTHON names no interpreter with Ray"),
    ("tests/clients/test_aider.py", "aider is not installed"),
    ("tests/golden/test_gemma3_270m.py", "LUCE_TEST_GEMMA3 names no file of Gemma 3 270M"),
    ("tests/golden/test_vocabularies.py", "LUCE_TEST_VOCABULARIES names no folder of vocabularies"),
)
_PROVED = pytest.StashKey[list[str]]()


@cache
def gpu_present() -> bool:
    """Whether a CUDA or HIP device opens here."""
    return bool(found())


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("luce")
    group.addoption("--skip-proved", action="store_true", help="leave out emulated tests that tools/proved.json names")
    group.addoption("--prove", action="store_true", help="as --skip-proved, and record what passes now")
    group.addoption("--strict-skips", action="store_true", help="fail on skips that tests/support/selection.py lacks")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--prove"):
        return
    parts = (config.option.keyword, config.option.deselect, config.option.maxfail)
    if any(parts) or any("::" in arg for arg in config.args):
        raise pytest.UsageError(
            "--prove: -k, -x, --deselect and single tests would prove a file by a part of its tests"
        )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(), "luce-recorder")


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [] if gpu_present() else ["no CUDA or HIP device: tests with the mark `gpu` are not collected"]
    if _skips_proved(config):
        lines.append(
            f"emulated tests of {len(_proved(config))} files passed with these sources before, and are left out"
        )
    return lines


def proved() -> list[str]:
    """The files, named from the repository's root, whose emulated tests passed with the present sources."""
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = frozenset(_proved(config) if _skips_proved(config) else ())
    chosen, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {}).values()
        names = (*getattr(item, "fixturenames", ()), *(value for value in params if isinstance(value, str)))
        if any(name.startswith("emulated") for name in names):
            item.add_marker("emulated")
        absent = item.get_closest_marker("gpu") and not gpu_present()
        repeated = item.get_closest_marker("emulated") and _file(item.nodeid) in known
        (left_out if absent or repeated else chosen).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    # Modules and the 17,000 collected tests live until the end. Looking for garbage among them takes 2 of the 10 s of
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


class Recorder:
    """Adds files all of whose emulated tests passed to the record, at the end of a run."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = defaultdict(lambda: True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "emulated" in report.keywords:
            self.passed[_file(report.nodeid)] &= report.passed

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # A run that ended early knows of a part of a file's tests.
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            files = [name for name, passed in self.passed.items() if passed]
            proofs.record("tests", {name: proofs.test_digest(proofs.ROOT / name) for name in files})


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
