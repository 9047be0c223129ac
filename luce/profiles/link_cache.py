"""Links to daemons in the user's cache folder: a file for each pair of ends, the way between them, and its address."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from luce.profiles.figure_files import FigureFiles
from luce.profiles.profile import LinkProfile
from luce.profiles.profile_cache import profile_key
from luce.runtime.host import HostDevice

LINKS: FigureFiles[LinkProfile] = FigureFiles("link", 3, LinkProfile)


def link_path(keys: Sequence[str], transport: str, address: str, folder: Path | None = None) -> Path:
    """The file of the link from this machine to the devices with these keys (profile_key).

    The end here is the CPU, whatever devices take part: activations are in its memory when they leave.
    `transport`: how activations travel. `address`: of a daemon on another machine, empty on this one.
    """
    return LINKS.path([platform.node(), profile_key(HostDevice()), list(keys), transport, address], folder)
