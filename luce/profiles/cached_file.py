"""JSON files in a cache folder: one value each, written whole or not at all, and believed only if it can be read."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from luce.decoders import json_decoder
from luce.log import event

_log = logging.getLogger("luce.profiles")
Value = TypeVar("Value")
#: seconds for which figures count
MAX_AGE = 90 * 86400


def read_cached(path: Path, type: type[Value]) -> Value | None:
    """The value in a file; None if there is no file, or if it has no such value, which the log says."""
    try:
        return json_decoder(type).decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        event(_log, "profile_unreadable", logging.WARNING, file=str(path), reason=error.strerror)
    except (ValueError, msgspec.MsgspecError) as error:
        _reject(path, str(error))
    return None


def counts(path: Path, flaw: str, measured: float) -> bool:
    """Whether the figures of a file count, which were measured at a time (seconds since 1970): not with a flaw, which
    the log says, and not if they are too old."""
    if flaw:
        _reject(path, flaw)
        return False
    return 0 <= time.time() - measured < MAX_AGE


def in_background(write: Callable[[], None]) -> None:
    """Let a thread of its own write what was observed: a slow disk holds up no step."""
    threading.Thread(target=write, name="luce-observed", daemon=True).start()


def _reject(path: Path, reason: str) -> None:
    event(_log, "profile_invalid", logging.WARNING, file=str(path), reason=reason)


def write_cached(path: Path, value: Any) -> None:
    """Put a value into a file that only this user reads. Where that cannot be written, the log says why."""
    content = msgspec.json.format(msgspec.json.encode(value))
    temporary = ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            temporary = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        event(_log, "profile_not_stored", logging.WARNING, file=str(path), reason=error.strerror)
