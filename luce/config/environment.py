"""The environment of this process. No other module reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child process: with these variables, without settings of Luce."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LUCE_")} | dict(variables)


def environment(name: str) -> str | None:
    """A variable that the operating system or systemd hands over (NOTIFY_SOCKET, EDITOR, ...), not a Luce setting."""
    return os.environ.get(name) or None


def variables() -> Mapping[str, str]:
    """All of them, settings of Luce among them."""
    return os.environ
