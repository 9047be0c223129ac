"""The directory for prompts that are cached on disk."""

from __future__ import annotations

import contextlib
from pathlib import Path

from luce.config.directories import refusal, user_cache_directory
from luce.config.settings import Config, flag
from luce.errors import UsageError


def cache_directory(config: Config) -> Path | None:
    """The directory of --kv-cache-dir, None if it is off. Raises UsageError if the path is not a directory, or not a
    safe one."""
    if config.kv_cache_dir == "off":
        return None
    if config.kv_cache_dir == "auto":
        return user_cache_directory() / "prefixes"
    directory = Path(config.kv_cache_dir).expanduser()
    # A path that cannot be read now may exist later, such as a disk that is not plugged in yet.
    with contextlib.suppress(OSError):
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        if not existing.is_dir():
            raise UsageError(f"{flag('kv_cache_dir')} {directory}: {existing} is not a directory", param="kv_cache_dir")
        if existing == directory and (reason := refusal(existing.stat())):
            raise UsageError(f"{flag('kv_cache_dir')} {directory}: {reason}", param="kv_cache_dir")
    return directory
