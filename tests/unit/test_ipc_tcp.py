"""Addresses, key files, and the certificates that a connection is made with."""

from __future__ import annotations

import dataclasses
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from luce.errors import DeviceError, UsageError
from luce.ipc.tcp import Connection, Tls, format_address, listen, open_key_file, parse_address
from tests.support.daemons import key_file, signed_key_file


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two key files."""
    folder = tmp_path_factory.mktemp("keys")
    return [key_file(folder / name) for name in ("one", "other")]


@pytest.mark.parametrize(("text", "host"), [("[::1]:9000", "::1"), ("far.example:9000", "far.example")])
def test_addresses(text: str, host: str) -> None:
    assert parse_address(text) == (host, 9000) and format_address(host, 9000) == text


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_that_everybody_can_read(
    keys: list[Path], mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys[1].chmod(mode)
    open_key_file(keys[1], "--shard-key-file", server=False)
    warning = f"--shard-key-file {keys[1]}: every user of this machine can read the key: chmod o= it"
    assert [record.getMessage() for record in caplog.records] == [warning] * warned


@pytest.mark.parametrize("text", ["", "-----BEGIN CERTIFICATE-----\n", "key", "\0"])
def test_what_is_no_key_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(UsageError, match=f"^--key-file {tmp_path}/file: not a private key with its certificate: "):
        open_key_file(tmp_path / "file", "--key-file", server=True)


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        open_key_file(tmp_path / "file", "--key-file", server=True)
    assert str(caught.value) == f"--key-file {tmp_path}/file: No such file or directory"


def handshake(client: Tls, daemon: Tls) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """The ends of a connection whose handshake is over."""
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(daemon.context.wrap_socket, theirs, server_side=True)
        return client.context.wrap_socket(ours), accepted.result(60)


def test_only_the_certificate_of_the_key_file_is_accepted(keys: list[Path], tmp_path: Path) -> None:
    # The handshake accepts what the key has signed: `openssl req -x509` makes an authority.
    signed = signed_key_file(tmp_path / "signed", keys[0])
    for key in (keys[0], signed):
        own = open_key_file(keys[0], "--key-file", server=False)
        theirs = open_key_file(key, "--key-file", server=True)
        client, daemon = handshake(own, theirs)
        with client, daemon:
            assert client.getpeercert(binary_form=True) == theirs.certificate
            if key == keys[0]:
                own.check_peer(client)
            else:
                with pytest.raises(ConnectionError, match="its certificate is not that of the key file"):
                    own.check_peer(client)


def test_a_daemon_whose_certificate_the_key_has_signed(keys: list[Path], tmp_path: Path) -> None:
    signed = open_key_file(signed_key_file(tmp_path / "signed", keys[0]), "--key-file", server=True)

    def serve(listener: socket.socket) -> bytes:
        plain, _ = listener.accept()
        with signed.context.wrap_socket(plain, server_side=True) as sock:
            return sock.recv(1)

    with listen("127.0.0.1:0") as listener, ThreadPoolExecutor(1) as pool:
        received = pool.submit(serve, listener)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        why = f"^shard: cannot connect to {address}: .*its certificate is not that of the key file"
        with pytest.raises(DeviceError, match=why):
            Connection("shard", address, open_key_file(keys[0], "--shard-key-file", server=False))
        # It learns nothing, not even the greeting.
        assert received.result(60) == b""


def test_what_a_connection_compares_with(keys: list[Path]) -> None:
    own = open_key_file(keys[0], "--key-file", server=False)
    client, daemon = handshake(own, open_key_file(keys[0], "--key-file", server=True))
    with client, daemon:
        for other in (b"", own.certificate[:-1], own.certificate + b"\0"):
            with pytest.raises(ConnectionError):
                dataclasses.replace(own, certificate=other).check_peer(client)
