"""The process `luce`: a command line, and the end of the process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from luce.cli.main import main


def script() -> NoReturn:
    """Run the command line of this process, and end it."""
    end_process(main())


def end_process(status: int) -> NoReturn:
    """End the process with an exit status, after all that is registered to run at its end.

    The interpreter would free every object by itself: 0.3 s behind `luce run`. It does so where threads still run that
    it waits for, or where output cannot be written.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    if any(not thread.daemon for thread in others):
        raise SystemExit(status)
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            # None: its file descriptor was closed at the start.
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        raise SystemExit(status) from None
    os._exit(status)
