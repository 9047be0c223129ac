"""Listening sockets: opened by address, or inherited from systemd (socket activation)."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

from luce.config.environment import environment
from luce.errors import ListenError

_FIRST_INHERITED = 3
#: connections that the kernel keeps until they are accepted
BACKLOG = 1024


def inherited() -> list[socket.socket]:
    """The listening stream sockets of `$LISTEN_FDS`, if $LISTEN_PID is this process; they become close-on-exec."""
    if environment("LISTEN_PID") != str(os.getpid()):
        return []
    sockets = []
    for fd in range(_FIRST_INHERITED, _FIRST_INHERITED + int(environment("LISTEN_FDS") or 0)):
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
        if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ListenError(f"inherited descriptor {fd} is not a listening stream socket")
        sock.setblocking(False)
        sockets.append(sock)
    return sockets


def listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Sockets for every address of the host names; port 0 is one free port for all. Raises ListenError."""
    sockets: dict[tuple[int, str], socket.socket] = {}
    try:
        for host in hosts:
            _listen(host, port, sockets)
    except ListenError:
        for sock in sockets.values():
            sock.close()
        raise
    return list(sockets.values())


def _listen(host: str, port: int, sockets: dict[tuple[int, str], socket.socket]) -> None:
    """Add the sockets of one host name, by family and address, unless they are there."""
    problem: OSError | None = None
    absent = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"--host {host}: {error.strerror}", param="host") from None
    works = False
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        key = family, str(address[0])
        shared = next(iter(sockets.values())).getsockname()[1] if sockets else port
        try:
            if key not in sockets:
                sockets[key] = _bound(family, (address[0], shared, *address[2:]))
            works = True
        except OSError as error:
            # `localhost` has an IPv6 address even on machines without IPv6: one address that works is enough.
            problem = error
            if error.errno not in absent:
                break
    if problem is not None and (not works or problem.errno not in absent):
        raise ListenError(f"--host {host} --port {port}: {problem.strerror}", param="port")


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def url(sock: socket.socket) -> str:
    """The URL of a listening socket."""
    address = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{address}"
    name = f"[{address[0]}]" if sock.family == socket.AF_INET6 else address[0]
    return f"http://{name}:{address[1]}"
