"""Where Luce keeps what outlives it."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from luce.config.environment import environment
from luce.config.settings import Config


def user_cache_directory() -> Path:
    """`$CACHE_DIRECTORY` under systemd, else the platform's directory for Luce."""
    return Path(environment("CACHE_DIRECTORY") or platformdirs.user_cache_dir("luce"))


def user_state_directory() -> Path:
    """`$STATE_DIRECTORY` under systemd, else the platform's directory for Luce."""
    return Path(environment("STATE_DIRECTORY") or platformdirs.user_state_dir("luce"))


def cache_directory(config: Config) -> Path | None:
    """The directory of --kv-cache-dir, None if there is to be none."""
    if config.kv_cache_dir == "off":
        return None
    if config.kv_cache_dir == "auto":
        return user_cache_directory() / "prefixes"
    return Path(config.kv_cache_dir).expanduser()
