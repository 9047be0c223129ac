"""A network namespace behind a cable that carries so many bits per second. Only root can make it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

# Of its own for each process.
_NETWORK = f"10.{64 + os.getpid() // 256 % 64}.{os.getpid() % 256}."
#: addresses of this end of the cable, and of the end in the namespace
HERE, THERE = f"{_NETWORK}1", f"{_NETWORK}2"


@contextlib.contextmanager
def namespace(rate: str) -> Iterator[str]:
    """A network namespace with a link of so many bits per second in each direction."""
    # Of its own for each process.
    name, near, far = (f"luce{os.getpid()}{suffix}" for suffix in ("n", "a", "b"))
    inside = ["ip", "netns", "exec", name]
    shape = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "200ms"]
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name],
        ["ip", "addr", "add", f"{HERE}/24", "dev", near],
        ["ip", "link", "set", near, "up"],
        [*inside, "ip", "addr", "add", f"{THERE}/24", "dev", far],
        [*inside, "ip", "link", "set", far, "up"],
        ["tc", "qdisc", "add", "dev", near, *shape],
        [*inside, "tc", "qdisc", "add", "dev", far, *shape],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True)
        yield name
    finally:
        subprocess.run(["ip", "link", "del", near], check=False)
        subprocess.run(["ip", "netns", "del", name], check=False)
