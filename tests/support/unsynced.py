"""Files of tests are not synchronised over and over again: a pytest plugin.

No test pulls the plug, so a test that synchronises thousands of times, 8 ms each on a busy disk, only waits. The first
calls of each test are real, so that one which the operating system refuses still fails. tests/crash holds which calls
come before which, and kills writers, which are processes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

#: calls that are real in each test
_REAL = 20


@pytest.fixture(autouse=True)
def unsynced() -> Iterator[None]:
    """Most of a test's calls of os.fsync only look whether the descriptor is open."""
    sync, left = os.fsync, iter(range(_REAL))

    def fsync(fd: int) -> None:
        if next(left, None) is None:
            os.fstat(fd)
        else:
            sync(fd)

    # Of its own: pytest would undo the `monkeypatch` of every test later than without this fixture.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield
