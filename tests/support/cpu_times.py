"""How much CPU the files of tests take, as a table behind the results: `pytest -p tests.support.cpu_times`.

Seconds of CPU of a test's process and of what it has waited for, in setup, call and teardown; other programs of the
machine show in them less than in times. Daemons of tests.support.warm are the children of a process that ends with the
run, and are not in the table.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

#: files in the table
MOST = 40
_SPENT = pytest.StashKey[float]()


def _spent() -> float:
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[_SPENT] = _spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    now = _spent()
    # xdist sends what a report has to the process that prints.
    report.cpu = now - item.config.stash.get(_SPENT, now)
    item.config.stash[_SPENT] = now
    return report


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Any:
    files: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu"):
                files[report.nodeid.partition("::")[0]] += report.cpu
    terminalreporter.section("seconds of CPU")
    for name, seconds in [("all", files.total()), *files.most_common(MOST)]:
        terminalreporter.write_line(f"{seconds:8.1f} {name}")
    return (yield)
