"""`luce shard`: a daemon that holds layers, a drafter, or a scorer of prompts for a server in another process.

The server starts the daemon (`--fds`) or connects to it (`--listen`).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
from pathlib import Path

from luce import log
from luce.compress.daemon import scorer_loader
from luce.draft.daemon import draft_loader
from luce.errors import UsageError
from luce.ipc.accept import accept_servers
from luce.ipc.child import descriptors
from luce.ipc.lease import hold
from luce.ipc.parent import die_with_parent
from luce.ipc.tcp import SERVER_TIMEOUT, format_address, listen, open_key_file
from luce.remote.daemon import serve
from luce.runtime.host import give_back_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model file and the address of a network daemon, or the sockets of a local one."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="this machine's copy of the server's model file")
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to listen on for servers on other machines")
    parser.add_argument(
        "--key-file", metavar="FILE", help="file with private key and certificate, the same as the server's"
    )
    parser.add_argument("--draft", metavar="PATH", help="this machine's copy of the server's draft")
    parser.add_argument(
        "--prefill-drafter", metavar="PATH", help="this machine's copy of the server's small model that reads prompts"
    )
    parser.add_argument("--fds", metavar="N,N", help=argparse.SUPPRESS)
    parser.add_argument("--lease", metavar="N", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the server is gone; over a network, serve one server after another until a signal."""
    writer = log.configure("info", journal=arguments.fds is not None)
    # As in luce.cli.serve; the server logs what a daemon writes.
    faulthandler.enable(2)
    try:
        if arguments.lease is not None:
            _hold_lease(arguments.lease)
        if arguments.fds is not None:
            _serve_parent(arguments.fds)
        else:
            _serve_network(arguments)
    finally:
        writer.stop()
    return 0


def _hold_lease(text: str) -> None:
    """End once the lease that comes through a descriptor is over, whatever this process does then."""

    def end(reason: str) -> None:
        os.write(2, f"luce shard: {reason}\n".encode())
        os._exit(1)

    try:
        fd = int(text)
        os.fstat(fd)
    except (ValueError, OSError):
        raise UsageError(f"--lease {text}: expected the descriptor of a pipe", param="lease") from None
    hold(fd, end)


def _serve_parent(fds: str) -> None:
    die_with_parent()
    try:
        requests, heartbeat = (socket.socket(fileno=fd) for fd in descriptors(fds))
    except (ValueError, OSError):
        raise UsageError(f"--fds {fds}: expected the descriptors of two sockets", param="fds") from None
    serve(requests, heartbeat, can_share=True, loaders=[draft_loader(), scorer_loader()])


def _serve_network(arguments: argparse.Namespace) -> None:
    if arguments.model is None or arguments.listen is None or arguments.key_file is None:
        raise UsageError("luce shard needs MODEL, --listen and --key-file", param="listen")
    # Imports for 60 ms what a local daemon does without.
    from luce.cli.pull import fetch

    path = fetch(arguments.model, None)
    draft, scorer = (None if it is None else Path(it) for it in (arguments.draft, arguments.prefill_drafter))
    tls = open_key_file(Path(arguments.key_file), "--key-file", server=True)
    with listen(arguments.listen) as listener:
        print(f"listening on {format_address(*listener.getsockname()[:2])}", flush=True)
        with accept_servers(listener, tls) as servers:
            for requests, heartbeat in servers:
                loaders = [draft_loader(path, draft), scorer_loader(scorer)]
                serve(
                    requests,
                    heartbeat,
                    can_share=False,
                    server_timeout=SERVER_TIMEOUT,
                    locate=lambda load, note: path,
                    loaders=loaders,
                )
                give_back_memory()
