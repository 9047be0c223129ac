"""Deadlines for a disk."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from luce.kvcache.disk.deadline import Deadline, SlowDiskError


def test_a_result_that_never_comes_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deadline, "seconds", 0.01)
    with pytest.raises(SlowDiskError, match="too long"):
        Deadline(0.0).wait(Future())


def test_a_time_out_of_the_disk_itself_is_raised_as_it_is() -> None:
    future: Future[int] = Future()
    future.set_exception(TimeoutError(110, "Connection timed out"))
    with pytest.raises(TimeoutError, match="Connection timed out"):
        Deadline().wait(future)


def test_a_result_that_is_there_is_returned_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deadline, "seconds", 0.0)
    future: Future[int] = Future()
    future.set_result(7)
    assert Deadline(0.0).wait(future) == 7
