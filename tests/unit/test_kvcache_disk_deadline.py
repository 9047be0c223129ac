"""Waiting for a disk."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from luce.kvcache.disk import deadline
from luce.kvcache.disk.deadline import Deadline, SlowError


def test_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "_SECONDS", 0.01)
    with pytest.raises(SlowError, match="too long"):
        Deadline(0.0).wait(Future())


def test_what_a_disk_says_itself_is_passed_on() -> None:
    future: Future[int] = Future()
    future.set_exception(TimeoutError(110, "Connection timed out"))
    with pytest.raises(TimeoutError, match="Connection timed out"):
        Deadline().wait(future)


def test_what_is_there_comes_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "_SECONDS", 0.0)
    future: Future[int] = Future()
    future.set_result(7)
    assert Deadline(0.0).wait(future) == 7
