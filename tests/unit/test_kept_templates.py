"""Processes of templates that tests keep: they answer as new ones, and only sound ones are kept."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from luce.text.template_message import pack, unpack
from tests.support import kept_templates
from tests.support.kept_templates import KeptChild, Waiting

SOURCE = "{% set space = namespace(said='') %}{% set space.said = space.said ~ name %}{{ space.said }}"


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.end()


def line(source: str = SOURCE) -> bytes:
    """The first line of a process."""
    return pack({"source": source, "seconds": 5.0})


def rendered(child: KeptChild, name: Any = "ada") -> Any:
    """What a process answers to a request."""
    request = {"variables": {"name": name}, "now": "2026-11-26T12:00:00", "seconds": 5.0}
    return unpack(child.ask(pack(request), 30))


def begun(waiting: Waiting, source: str = SOURCE) -> KeptChild:
    child = KeptChild(waiting)
    assert unpack(child.ask(line(source), 30)) == {"text": ""}
    return child


def test_a_process_goes_on_with_the_next_user_of_its_template(waiting: Waiting) -> None:
    first = begun(waiting)
    assert first.silence() == 0.0 and rendered(first) == {"text": "ada"}
    pid = first.process.pid
    first.end()
    first.end()
    other = begun(waiting, "other")
    assert other.process.pid != pid
    again = begun(waiting)
    # It keeps nothing of the last render.
    assert again.process.pid == pid and rendered(again, "bob") == {"text": "bob"}
    # One user at a time, who need not end it.
    busy = begun(waiting)
    assert busy.process.pid != pid
    del again
    gc.collect()
    assert begun(waiting).process.pid == pid


def test_a_process_that_failed_is_not_kept(waiting: Waiting) -> None:
    child = begun(waiting, "{{ name.a.b }}")
    assert "error" in rendered(child)
    pid = child.process.pid
    child.end()
    assert begun(waiting, "{{ name.a.b }}").process.pid != pid


def test_a_process_that_ended_meanwhile_is_not_taken(waiting: Waiting) -> None:
    child = begun(waiting)
    process = child.process
    child.end()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert begun(waiting).process.pid != process.pid


def test_few_are_kept_and_none_behind_the_end(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_templates, "MOST", 2)
    few = Waiting()
    children = [begun(few, source) for source in ("a", "a", "b", "c")]
    processes = [child.process for child in children]
    for child in children:
        child.end()
    # The second one of a template, and the third template, have no place.
    assert [process.poll() is None for process in processes] == [True, False, True, False]
    late = begun(few, "late")
    process = late.process
    few.end()
    assert processes[0].poll() is not None and process.poll() is None
    late.end()
    assert process.poll() is not None
