"""Short turns at the interpreter, for as long as anybody reads."""

from __future__ import annotations

import sys

import pytest

from luce.kvcache.disk.switch_interval import SwitchInterval


def test_the_interval_comes_back_with_the_last_one_out() -> None:
    found, turns = sys.getswitchinterval(), SwitchInterval()
    with turns:
        short = sys.getswitchinterval()
        assert short < found
        with turns:
            assert sys.getswitchinterval() == short
        assert sys.getswitchinterval() == short
    assert sys.getswitchinterval() == found


def test_an_error_does_not_keep_it_short() -> None:
    found, turns = sys.getswitchinterval(), SwitchInterval()
    with pytest.raises(OSError, match="gone"), turns:
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
