"""Folders for keys, of a process that may be killed at any time. They lie in the folder of their node."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from luce.ray import process_list
from luce.ray.process_list import Process

_PREFIX = "luce-process-"


def private_folder() -> Path:
    """A new folder of this process that other users may not enter. Those of processes that are gone are removed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (owner := _owner(path.name)) is not None and not process_list.runs(owner):
            shutil.rmtree(path, ignore_errors=True)
    me = process_list.process(os.getpid())
    assert me is not None
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{me.pid}-{me.started}-"))


def _owner(name: str) -> Process | None:
    """The process that a folder's name says."""
    pid, _, rest = name.removeprefix(_PREFIX).partition("-")
    started = rest.partition("-")[0]
    return Process(int(pid), int(started)) if pid.isdigit() and started.isdigit() else None
