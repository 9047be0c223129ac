"""What a child process owes its parent: not to outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when the thread that started it ends, even while this process is stopped.

    `parent` is the id of the process that started this one: if it has ended already, this process ends now. Without it,
    the end of a socket or pipe must tell.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        raise SystemExit(1)
