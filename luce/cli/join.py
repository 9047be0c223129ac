"""`luce join`: lend this machine's devices to a server that was started with --cluster.

With TOKEN this machine becomes a member first; `luce join --cluster NAME` is enough later. It needs no open port.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from luce import log
from luce.cluster.cluster_files import ClusterFiles
from luce.cluster.join_token import decode_token
from luce.cluster.member import LEAVE_SECONDS, MemberHost, join
from luce.cluster.member_weights import Storage
from luce.config.values import devices, number
from luce.errors import UsageError
from luce.ipc.tcp import SERVER_TIMEOUT
from luce.layers.kept_weights import KeptWeights
from luce.log import event
from luce.remote.daemon import Locate, serve
from luce.runtime.host import give_back_memory
from luce.runtime.open import named

_log = logging.getLogger("luce.cluster")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The token, or the cluster that this machine has joined; its devices and its models."""
    parser.add_argument(
        "token", metavar="TOKEN", nargs="?", help="what `luce cluster token` printed; - reads it from standard input"
    )
    parser.add_argument("--cluster", metavar="NAME", help="without TOKEN: the cluster that this machine has joined")
    parser.add_argument(
        "--devices",
        metavar="DEVICE[,DEVICE...]",
        default="auto",
        help="devices of this machine to lend: cuda:N, hip:N, cpu:N (default: all GPUs, or the CPU)",
    )
    parser.add_argument(
        "--model-dir",
        metavar="DIR",
        action="append",
        default=[],
        help="folder in which the server's model file is looked for, under any name; may be repeated (default: where "
        "models usually lie)",
    )
    parser.add_argument(
        "--cache-size",
        metavar="GIB",
        help="most disk space for weights that the server sends because this machine lacks its model file; those that "
        "were used the longest ago go first (default: what the disk has)",
    )
    parser.add_argument(
        "--verify-weights",
        metavar="WHEN",
        default="once",
        choices=("once", "always", "never"),
        help="when the weights of its layers in this machine's own file are compared with the server's: once, for a "
        "file that has not changed since, always or never (default: once)",
    )
    parser.add_argument(
        "--leave-timeout",
        metavar="SECONDS",
        help="how long this machine serves its layers behind SIGTERM, until other machines have them (default: 60)",
    )
    parser.set_defaults(behind_flags="token")


def run(arguments: argparse.Namespace) -> int:
    """Stay a member until a signal. Raises UsageError and DeviceError."""
    if (arguments.token is None) == (arguments.cluster is None):
        raise UsageError("luce join needs TOKEN, or --cluster NAME of a cluster that this machine has joined")
    try:
        names = devices(arguments.devices)
    except ValueError as error:
        raise UsageError(f"--devices {arguments.devices}: {error}", param="devices") from None
    lent = named(names)
    if foreign := [str(name) for name in lent if name.place]:
        raise UsageError(f"--devices {foreign[0]}: is not a device of this machine", param="devices")
    folders = [Path(text).expanduser() for text in arguments.model_dir]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise UsageError(f"--model-dir {missing[0]}: is not a directory", param="model_dir")
    try:
        limit = int(number(0.1, 1e6)(arguments.cache_size) * 2**30) if arguments.cache_size is not None else 0
    except ValueError as error:
        raise UsageError(f"--cache-size {arguments.cache_size}: {error}", param="cache_size") from None
    try:
        leave = number(0, 86400)(arguments.leave_timeout) if arguments.leave_timeout is not None else LEAVE_SECONDS
    except ValueError as error:
        raise UsageError(f"--leave-timeout {arguments.leave_timeout}: {error}", param="leave_timeout") from None
    storage = Storage(folders, limit, arguments.verify_weights)
    writer = log.configure("info")
    faulthandler.enable(2)
    try:
        known = arguments.token is None
        files = ClusterFiles(arguments.cluster, make=False) if known else _joined(arguments.token)
        weights = KeptWeights()
        host = MemberHost(
            files, tuple(map(str, lent)), storage, partial(_serve, weights), float(leave), partial(_release, weights)
        )
        with _ended_by_signals(host):
            host.run()
        event(_log, "left", cluster=files.name)
    finally:
        writer.stop()
    return 0


def _joined(given: str) -> ClusterFiles:
    """The directory of the cluster that this machine joins with a token."""
    token = decode_token(sys.stdin.readline() if given == "-" else given)
    files = ClusterFiles(token.cluster)
    join(token, files, socket.gethostname())
    event(_log, "joined", cluster=files.name)
    return files


@contextlib.contextmanager
def _ended_by_signals(host: MemberHost) -> Iterator[None]:
    """Let a member leave at SIGTERM and SIGINT until the block ends; a second signal ends the process at once."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        host.leave()

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(
    weights: KeptWeights,
    requests: socket.socket,
    heartbeat: socket.socket,
    locate: Locate,
    on_loaded: Callable[[], None],
) -> None:
    hooks: dict[str, Any] = {"locate": locate, "on_loaded": on_loaded, "weights": weights}
    serve(requests, heartbeat, can_share=False, server_timeout=SERVER_TIMEOUT, **hooks)


def _release(weights: KeptWeights) -> None:
    weights.release()
    give_back_memory()
