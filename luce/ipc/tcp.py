"""Daemons on other machines: the same two channels over TLS, where each side proves that it has the key file.

The key file is PEM: a private key and its self-signed certificate, the same file on both sides. Each side presents this
certificate and accepts no other one, whoever signed it, so a peer without the key cannot send a message.

    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=luce -keyout k -out c
    cat k c > FILE && chmod 600 FILE
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from luce.errors import DeviceError, ListenError, UsageError

_log = logging.getLogger(__name__)

#: seconds for a connection, its TLS handshake and its greeting
HANDSHAKE_TIMEOUT = 10.0
#: seconds without a Ping after which a server counts as gone; it sends one each second
SERVER_TIMEOUT = 30.0
#: bytes of the token that the two connections of a server have in common
TOKEN_BYTES = 16
#: the first byte of a greeting: which of the two connections this is
REQUESTS, HEARTBEAT = b"R", b"W"


@dataclass(frozen=True)
class Tls:
    """The TLS settings of one side."""

    context: ssl.SSLContext
    #: the certificate of the key file, DER: both sides have it
    certificate: bytes

    def check_peer(self, sock: ssl.SSLSocket) -> None:
        """Raises ConnectionError unless the peer's certificate is that of the key file, after the handshake.

        The handshake also accepts certificates that it has signed: `openssl req -x509` makes an authority.
        """
        if sock.getpeercert(binary_form=True) != self.certificate:
            raise ConnectionError("its certificate is not that of the key file")

    def admit(self, sock: ssl.SSLSocket, host: str) -> bool:
        """As in luce.ipc.accept.Gate."""
        self.check_peer(sock)
        return True


def open_key_file(key_file: Path, flag: str, *, server: bool) -> Tls:
    """The TLS settings for a key file that `flag` names.

    Logs a warning if other users can read the file. Raises UsageError if it is not a key with its certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The peer must have this very certificate; the names in it do not matter.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        # The channel would take a session ticket for the beginning of a frame.
        context.num_tickets = 0
    try:
        context.load_cert_chain(key_file)
        context.load_verify_locations(key_file)
        # The first one is the one that is shown.
        first, end, _ = key_file.read_text("latin-1").partition(ssl.PEM_FOOTER)
        certificate = ssl.PEM_cert_to_DER_cert(first[first.index(ssl.PEM_HEADER) :] + end)
        if key_file.stat().st_mode & stat.S_IROTH:
            _log.warning("%s %s: every user of this machine can read the key: chmod o= it", flag, key_file)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            f"{flag} {key_file}: not a private key with its certificate: {error}", param="key_file"
        ) from None
    except OSError as error:
        raise UsageError(f"{flag} {key_file}: {error.strerror}", param="key_file") from None
    return Tls(context, certificate)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`; `[::1]:port` for IPv6. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("expected HOST:PORT")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    """The reverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Connection:
    """A connected daemon on another machine. Raises DeviceError with its name if it cannot be connected to."""

    silence_hint = "; it serves one server at a time, and may be serving another one"

    def __init__(self, name: str, address: str, tls: Tls) -> None:
        self.requests: socket.socket
        self.heartbeat: socket.socket
        token = secrets.token_bytes(TOKEN_BYTES)
        with contextlib.ExitStack() as opened:
            try:
                self.requests = opened.enter_context(connect(address, tls, REQUESTS + token))
                self.heartbeat = opened.enter_context(connect(address, tls, HEARTBEAT + token))
            except (OSError, ValueError) as error:
                raise DeviceError(f"{name}: cannot connect to {address}: {error}") from error
            opened.pop_all()

    def kill(self) -> None:
        """Nothing to do: the caller closes the sockets, which ends the connection."""

    def join(self) -> str:
        """As in Peer."""
        return "its connection has ended"


class PeerCheck(Protocol):
    """How a client connects, and which peer it accepts."""

    @property
    def context(self) -> ssl.SSLContext:
        """The TLS settings."""

    def check_peer(self, sock: ssl.SSLSocket) -> None:
        """Raises ConnectionError if the peer is another one, after the handshake and before anything is sent."""


def connect(address: str, tls: PeerCheck, greeting: bytes) -> ssl.SSLSocket:
    """A TLS connection after the greeting. Raises OSError, and ValueError for an address."""
    plain = socket.create_connection(parse_address(address), timeout=HANDSHAKE_TIMEOUT)
    with contextlib.ExitStack() as opened:
        opened.enter_context(plain)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = opened.enter_context(tls.context.wrap_socket(plain))
        tls.check_peer(sock)
        sock.sendall(greeting)
        opened.pop_all()
    return sock


def listen(address: str, flag: str = "--listen") -> socket.socket:
    """A listening socket for the address of `flag`. Raises UsageError or ListenError with the address."""
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise UsageError(f"{flag} {address}: {error}", param="listen") from None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ListenError(f"{flag} {address}: {error.strerror or error}") from error
