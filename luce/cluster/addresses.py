"""The addresses that a join token names."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

from luce.ipc.tcp import format_address

_SIOCGIFADDR = 0x8915


def reachable(host: str, port: int) -> tuple[str, ...]:
    """HOST:PORT of a listening socket, for others: for 0.0.0.0 and :: the IPv4 addresses of this machine's interfaces,
    those of the loopback interface last."""
    if host not in ("0.0.0.0", "::"):
        return (format_address(host, port),)
    found = [address for _, name in socket.if_nameindex() if (address := _address_of(name))]
    found.sort(key=lambda address: address.startswith("127."))
    return tuple(format_address(address, port) for address in found) or (format_address("127.0.0.1", port),)


def _address_of(interface: str) -> str:
    """The first IPv4 address of an interface, "" if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
    return ""
