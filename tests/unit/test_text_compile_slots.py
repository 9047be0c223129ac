"""luce/text/compile_slots.py: calls of a stand-in that blocks as long as the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from luce.errors import QueueFullError, UnavailableError
from luce.text.compile_slots import SLOTS, CompileSlots


def slots(limit: float = 600.0, *, entries: int = 8, costs: int = 1000) -> CompileSlots[str]:
    return CompileSlots(limit, "late", entries=entries, costs=costs)


class Blocked:
    """Calls that wait for `gate`; counts those that run and those that have begun."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.running = self.most = self.calls = 0
        self._lock = threading.Lock()

    def call(self, result: str) -> Callable[[], str]:
        def run() -> str:
            with self._lock:
                self.calls += 1
                self.running += 1
                self.most = max(self.most, self.running)
            self.begun.release()
            assert self.gate.wait(60)
            with self._lock:
                self.running -= 1
            return result

        return run


def test_few_calls_run_at_a_time_and_the_others_wait() -> None:
    made, blocked = slots(), Blocked()
    tickets = [made.ticket(bytes([i]), 1, blocked.call(str(i))) for i in range(6)]
    for _ in range(SLOTS):
        assert blocked.begun.acquire(timeout=60)
    assert not blocked.begun.acquire(blocking=False)
    blocked.gate.set()
    assert [ticket.result() for ticket in tickets] == [str(i) for i in range(6)]
    assert blocked.most == SLOTS
    made.close()


def test_equal_keys_are_one_call() -> None:
    made, blocked = slots(), Blocked()
    tickets = [made.ticket(b"same", 1, blocked.call(f"call {i}")) for i in range(50)]
    blocked.gate.set()
    assert {ticket.result() for ticket in tickets} == {"call 0"} and blocked.calls == 1
    assert (made.hits, made.misses) == (49, 1)
    made.close()


def test_a_call_that_takes_too_long_is_late_and_keeps_its_slot() -> None:
    made, blocked, quick = slots(0.05), Blocked(), slots()
    slow = [made.ticket(bytes([i]), 1, blocked.call("done")) for i in range(SLOTS)]
    assert [ticket.result() for ticket in slow] == ["late"] * SLOTS
    # Both slots are taken: nothing else begins, and the client hears that in time.
    waiting = made.ticket(b"waits", 1, lambda: "never in time")
    with pytest.raises(QueueFullError, match="other grammars are being compiled"):
        waiting.result()
    blocked.gate.set()
    # What is late stays so: the result that comes afterwards is thrown away.
    assert made.ticket(bytes([0]), 1, lambda: "other").result() == "late"
    quick.close()
    made.close()


def test_too_many_that_wait_are_refused() -> None:
    made, blocked = slots(), Blocked()
    with pytest.raises(QueueFullError):
        for i in range(1000):
            made.ticket(i.to_bytes(2), 1, blocked.call(""))
    assert i == SLOTS + 64
    blocked.gate.set()
    made.close()


@pytest.mark.parametrize(("entries", "costs"), [(3, 1000), (100, 30)])
def test_the_least_used_results_are_forgotten(entries: int, costs: int) -> None:
    made, calls = slots(entries=entries, costs=costs), list[str]()

    def ask(key: str) -> None:
        def call() -> str:
            calls.append(key)
            return key

        assert made.ticket(key.encode(), 10, call).result() == key

    for key in "abca" + "d" + "a":
        ask(key)
    assert calls == ["a", "b", "c", "d"]
    ask("b")
    assert calls == ["a", "b", "c", "d", "b"]
    made.close()


def test_what_a_call_raises_is_raised_and_not_kept() -> None:
    made = slots()

    def fail() -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        made.ticket(b"k", 1, fail).result()
    assert made.ticket(b"k", 1, lambda: "fine").result() == "fine"
    made.close()


def test_nothing_begins_after_the_close() -> None:
    made = slots()
    made.close()
    with pytest.raises(UnavailableError):
        made.ticket(b"k", 1, lambda: "")
