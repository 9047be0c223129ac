"""Directories for files that outlive the process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import platformdirs

from luce.config.environment import environment


def user_cache_directory() -> Path:
    """`$CACHE_DIRECTORY` under systemd, else the platform's directory for Luce."""
    return Path(environment("CACHE_DIRECTORY") or platformdirs.user_cache_dir("luce"))


def hugging_face_cache() -> Path:
    """The hub cache of huggingface_hub and of the tools that use it, by the variables that it documents."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := environment(name):
            return Path(_expanded(value))
    if home := environment("HF_HOME"):
        return Path(_expanded(home)) / "hub"
    return Path(_expanded(environment("XDG_CACHE_HOME") or "~/.cache")) / "huggingface" / "hub"


def _expanded(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))


def user_state_directory() -> Path:
    """`$STATE_DIRECTORY` under systemd, else the platform's directory for Luce."""
    return Path(environment("STATE_DIRECTORY") or platformdirs.user_state_dir("luce"))


def user_data_directory() -> Path:
    """`$STATE_DIRECTORY` under systemd, else the platform's directory for data that Luce cannot make again."""
    return Path(environment("STATE_DIRECTORY") or platformdirs.user_data_dir("luce"))


def refusal(status: os.stat_result) -> str:
    """Why a directory is not safe for prompts, "" if it is: its files must be this user's alone to change."""
    if status.st_uid != os.geteuid():
        return f"user {status.st_uid} owns it, and Luce runs as user {os.geteuid()}"
    if status.st_mode & stat.S_IWOTH:
        return f"everybody may write to it (mode {stat.S_IMODE(status.st_mode):04o}); `chmod o-w` mends that"
    return ""
