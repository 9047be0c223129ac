"""A process that works only as long as another one says that it may: a pipe, with a byte every few seconds.

The end of the pipe tells that the other process is gone; silence, that it stands still. Neither may leave a device
taken.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

#: seconds of silence after which the lease is over, and between two bytes
LEASE_SECONDS, RENEW_SECONDS = 10.0, 2.0


def hold(fd: int, end: Callable[[str], None], seconds: float = LEASE_SECONDS) -> threading.Thread:
    """A thread that calls `end` with the reason once the lease that comes through `fd` is over."""

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while poll.poll(seconds * 1000):
            if not os.read(fd, 4096):
                end("the process that lent this one its time is gone")
                return
        end(f"no sign of life for {seconds:g} s from the process that lent this one its time")

    thread = threading.Thread(target=watch, name="lease", daemon=True)
    thread.start()
    return thread


def renew(fd: int, seconds: float = RENEW_SECONDS) -> threading.Thread:
    """A thread that renews a lease through `fd` until nobody reads it. `fd` is closed then."""

    def write() -> None:
        try:
            while True:
                os.write(fd, b".")
                time.sleep(seconds)
        except OSError:
            os.close(fd)

    thread = threading.Thread(target=write, name="lease-renewal", daemon=True)
    thread.start()
    return thread
