"""The switch interval is short while any thread reads."""

from __future__ import annotations

import sys

import pytest

from luce.runtime.switch_interval import SwitchInterval


def test_the_last_context_to_end_restores_the_interval() -> None:
    found, context = sys.getswitchinterval(), SwitchInterval()
    with context:
        short = sys.getswitchinterval()
        assert short < found
        with context:
            assert sys.getswitchinterval() == short
        assert sys.getswitchinterval() == short
    assert sys.getswitchinterval() == found


def test_an_error_restores_the_interval() -> None:
    found, context = sys.getswitchinterval(), SwitchInterval()
    with pytest.raises(OSError, match="gone"), context:
        raise OSError("gone")
    assert sys.getswitchinterval() == found


def test_a_shorter_interval_stays() -> None:
    found = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        own = sys.getswitchinterval()
        with SwitchInterval():
            assert sys.getswitchinterval() == own
        assert sys.getswitchinterval() == own
    finally:
        sys.setswitchinterval(found)
