"""The environment of this process. No other module reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping

#: the file of simulated devices (luce.runtime.simulated)
SIMULATED_DEVICES = "LUCE_SIM_DEVICES"
#: variables of Luce that are no settings; LUCE_CONFIG names the file of settings
NO_SETTINGS = ("LUCE_CONFIG", SIMULATED_DEVICES)


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process: this one's without Luce's settings, and these variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LUCE_")} | dict(variables)


def environment(name: str) -> str | None:
    """A variable of the operating system or of systemd (NOTIFY_SOCKET, EDITOR, ...), or one of NO_SETTINGS; None if
    empty."""
    return os.environ.get(name) or None


def variables() -> Mapping[str, str]:
    """All variables, with those that are settings of Luce."""
    return os.environ
