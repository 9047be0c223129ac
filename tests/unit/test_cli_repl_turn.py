"""A reply that is interrupted, and the line below a reply."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from luce.cli.repl.replier import Ending
from luce.cli.repl.turn import Interrupt, speed

TIMES = [10.0, 10.25, 11.25]


def test_speed_is_the_line_of_the_specification() -> None:
    ending = Ending("eos", tokens=312, prompt=4120, cached=3968, drafted=300, accepted=222)
    times = [0.0, 0.21, 0.21 + 311 / 58.4]
    assert speed(ending, times, context=32768) == (
        "312 tok · 58.4 tok/s · first 0.21 s · prompt 4,120 (3,968 cached) · draft 71 %, 3.5 a step · ctx 4,432/32,768"
    )


def test_speed_says_only_what_is_known() -> None:
    ending = Ending("eos", tokens=4, prompt=5)
    assert speed(ending, TIMES, context=100) == "4 tok · 3.0 tok/s · first 0.25 s · prompt 5 · ctx 9/100"
    assert speed(ending, TIMES[:1], context=None) == "4 tok · prompt 5 · ctx 9"
    unknown = dataclasses.replace(ending, prompt=None, tokens=1)
    assert speed(unknown, TIMES[:2], context=100) == "1 tok · first 0.25 s"
    none = dataclasses.replace(ending, tokens=None)
    assert speed(none, TIMES[:1], context=100) == "0 tok · prompt 5 · ctx 5/100"


def test_a_key_pressed_just_before_a_wait_ends_it() -> None:
    """The caller has looked at `pressed`, and the server sends nothing more."""
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed
        with pytest.raises(KeyboardInterrupt):
            interrupt.wait(lambda: pytest.fail("waits"))


def test_a_key_pressed_while_nothing_waits_raises_nothing() -> None:
    with Interrupt() as interrupt:
        assert interrupt.wait(lambda: 5) == 5
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed
