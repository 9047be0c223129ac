"""`luce shard`: hold layers, or a drafter, for a server in another process.

The server starts it (`--fds`) or connects to it (`--listen`).
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from luce import log
from luce.cli.pull import fetch
from luce.draft.daemon import opener
from luce.errors import UsageError
from luce.ipc.child import descriptors, die_with_parent
from luce.ipc.tcp import SILENCE, listening, sessions, spelled, tls
from luce.remote.daemon import serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model file and the address of a network daemon, or the sockets of a local one."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="this machine's copy of the server's model file")
    parser.add_argument("--listen", metavar="HOST:PORT", help="address for servers of other machines")
    parser.add_argument("--key-file", metavar="FILE", help="key and certificate; the server needs the same file")
    parser.add_argument("--draft", metavar="PATH", help="this machine's copy of the server's draft")
    parser.add_argument("--fds", metavar="N,N", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the server is gone; over a network one server after another, until a signal."""
    writer = log.configure("info", journal=arguments.fds is not None)
    try:
        if arguments.fds is not None:
            _serve_parent(arguments.fds)
        else:
            _serve_network(arguments)
    finally:
        writer.stop()
    return 0


def _serve_parent(fds: str) -> None:
    die_with_parent()
    try:
        requests, watch = (socket.socket(fileno=fd) for fd in descriptors(fds))
    except (ValueError, OSError):
        raise UsageError(f"--fds {fds}: expected two descriptors of sockets", param="fds") from None
    serve(requests, watch, shares=True, open_draft=opener())


def _serve_network(arguments: argparse.Namespace) -> None:
    if arguments.model is None or arguments.listen is None or arguments.key_file is None:
        raise UsageError("luce shard needs MODEL, --listen and --key-file", param="listen")
    path = fetch(arguments.model)
    draft = None if arguments.draft is None else Path(arguments.draft)
    context = tls(Path(arguments.key_file), "--key-file", server=True)
    with listening(arguments.listen) as listener:
        print(f"listening on {spelled(*listener.getsockname()[:2])}", flush=True)
        with sessions(listener, context) as servers:
            for requests, watch in servers:
                serve(requests, watch, shares=False, silence=SILENCE, path=path, open_draft=opener(path, draft))
