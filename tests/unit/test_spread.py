"""tests/support/spread.py: the order in which processes of xdist take files of tests."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.spread import SECONDS, WAITING, spread

FILES = [f"tests/{name}.py" for name in ("crash/a", "golden/a", "golden/b", *(f"process/{n}" for n in range(9)))]
FILES += [f"tests/unit/{number}.py" for number in range(40)]


@pytest.mark.parametrize("files", [FILES, FILES[:3], FILES[3:12], FILES[11:13], []])
def test_each_file_is_there_once_in_its_own_order(files: list[str]) -> None:
    found = spread(files)
    assert sorted(found) == sorted(files)
    for waits in (True, False):
        mine = [file for file in files if file.startswith(WAITING) == waits]
        assert [file for file in found if file.startswith(WAITING) == waits] == mine


def test_files_that_wait_are_spread_over_the_work_and_not_at_its_end() -> None:
    found, total = spread(FILES), 0.0
    starts = list[float]()
    for file in found:
        if file.startswith(WAITING):
            starts.append(total)
        else:
            total += next((seconds for folder, seconds in SECONDS.items() if file.startswith(folder)), 1)
    longest = max(SECONDS.values())
    assert starts[0] == 0 and starts[-1] < 0.8 * total
    # A file that computes for long may stand between two.
    assert max(after - before for before, after in pairwise(starts)) <= total / len(starts) + longest
    assert found[-5:] == FILES[-5:]
