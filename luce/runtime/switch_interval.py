"""A shorter switch interval of the interpreter while threads read, copy or decode.

A thread that waits for the interpreter asks for it after Python's switch interval, 5 ms. Until then the reading threads
pass the interpreter among themselves, as each of them releases it after a few microseconds of Python code and takes it
again, and the thread that gives them work waits; or that thread computes, and all of them wait for it. The first token
behind 32768 tokens of a 27B model came from the disk after 389 to 434 ms; with an interval of 0.5 ms after 302 and 319;
with 0.2 ms after 256 (H200, 32 cores, 16 threads; each in a new process).
"""

from __future__ import annotations

import sys
import threading

_SECONDS = 0.0002


class SwitchInterval:
    """A context with a short switch interval. The interval belongs to the process: contexts may overlap, and the last
    one to end restores the interval that the first one found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SECONDS))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._before)


#: shared by all code that reads, copies or decodes with several threads
short_switch_interval = SwitchInterval()
