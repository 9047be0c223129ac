"""Short turns for threads at the interpreter.

Who waits for the interpreter asks for it after an interval of Python's, 5 ms. Until then it can go to and fro between
threads that decode, each of which hands it back after a few microseconds of a frame's Python and takes it again, while
the engine's thread, which queues their copies and gives them work, waits on. The first token behind 32768 tokens of a
27B model came from the disk after 389 to 434 ms, with 0.5 ms after 302 and 319, with 0.2 after 256 (H200, 32 cores, 16
threads; each in a new process).
"""

from __future__ import annotations

import sys
import threading

_SECONDS = 0.0002


class SwitchInterval:
    """A context within which nobody waits long for a turn. The interval is the process's: the last one out puts it back
    to what the first one in found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._found = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._found = sys.getswitchinterval()
                sys.setswitchinterval(min(self._found, _SECONDS))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._found)


#: for whatever reads with several threads
turns = SwitchInterval()
