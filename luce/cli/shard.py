"""`luce shard`: hold layers for a server in another process. The server starts it with `--fds`."""

from __future__ import annotations

import argparse
import socket

from luce import log
from luce.backend.daemon import serve
from luce.errors import UsageError
from luce.remote.child import descriptors, die_with_parent


def run(arguments: argparse.Namespace) -> int:
    """Serve until the server is gone; the exit status is 0 then."""
    die_with_parent()
    try:
        requests, watch = (socket.socket(fileno=fd) for fd in descriptors(arguments.fds))
    except (ValueError, OSError):
        raise UsageError(f"--fds {arguments.fds}: expected two descriptors of sockets", param="fds") from None
    writer = log.configure("info", journal=True)
    try:
        serve(requests, watch, shares=True)
    finally:
        writer.stop()
    return 0
