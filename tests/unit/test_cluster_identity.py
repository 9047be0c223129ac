"""Keys and certificates of hosts, the files that keep them, and which peers the TLS settings accept."""

from __future__ import annotations

import socket
import ssl
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from luce.cluster.cluster_files import ClusterFiles, clusters, is_cluster_name
from luce.cluster.gate import member_name
from luce.cluster.identity import (
    Identity,
    coordinator_context,
    flaw,
    join_context,
    member_context,
    pin,
    read_identity,
)
from luce.errors import UsageError
from tests.support.clusters import identity
from tests.support.daemons import key_file, signed_key_file


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    """The identities of a coordinator, a member and a stranger."""
    folder = tmp_path_factory.mktemp("hosts")
    return [identity(folder / name) for name in ("coordinator", "member", "stranger")]


def test_what_a_certificate_says(hosts: list[Identity]) -> None:
    command = ["openssl", "x509", "-in", str(hosts[0].path), "-noout", "-text"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for part in ("CA:FALSE", "prime256v1", "Not Before: Jan  1 00:00:00 2000", "Not After : Dec 31 00:00:00 9999"):
        assert part in text
    printed = subprocess.run([*command[:4], "-noout", "-fingerprint", "-sha256"], check=True, capture_output=True)
    assert (
        printed.stdout.decode().strip().rpartition("=")[2].replace(":", "").lower() == pin(hosts[0].certificate).hex()
    )


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[bytes | None, bytes | None, str | None]:
    """The certificates that client and server have seen, and the protocol. Raises OSError."""
    ours, theirs = socket.socketpair()

    def serve() -> tuple[bytes | None, str | None]:
        with server.wrap_socket(theirs, server_side=True) as sock:
            sock.sendall(b"!")
            return sock.getpeercert(binary_form=True), sock.selected_alpn_protocol()

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        with client.wrap_socket(ours) as sock:
            # With TLS 1.3 a client learns only when it reads that it is refused.
            assert sock.recv(1) == b"!" and sock.version() == "TLSv1.3"
            seen = sock.getpeercert(binary_form=True)
        return seen, *serving.result(60)


def test_only_pinned_certificates_pass_the_handshake(hosts: list[Identity]) -> None:
    ours, member, stranger = hosts
    server = coordinator_context(ours, [member.certificate])
    both = (ours.certificate, member.certificate, "luce/1")
    assert handshake(member_context(member, [ours.certificate]), server) == both
    for client in (member_context(stranger, [ours.certificate]), member_context(member, [stranger.certificate])):
        with pytest.raises(ssl.SSLError):
            handshake(client, server)
    # A host that joins has no certificate that anybody knows; the gate is what stops it from more.
    assert handshake(join_context(), server) == (ours.certificate, None, "luce-join/1")


def test_certificates_do_not_hide_each_other(hosts: list[Identity]) -> None:
    server = coordinator_context(hosts[0], [host.certificate for host in hosts])
    for host in hosts[1:]:
        pinned = [each.certificate for each in hosts]
        assert handshake(member_context(host, pinned), server)[:2] == (hosts[0].certificate, host.certificate)


def test_certificates_that_cannot_be_pinned(hosts: list[Identity], tmp_path: Path) -> None:
    authority = ssl.PEM_cert_to_DER_cert(key_file(tmp_path / "ca").with_suffix(".crt").read_text())
    ours, member, _ = hosts
    assert flaw(member.certificate) == ""
    assert flaw(authority) == "its certificate is that of an authority"
    assert flaw(member.certificate + ours.certificate) == "it sent several certificates"
    for data in (b"", b"certificate", member.certificate[:-1]):
        assert flaw(data).startswith("its certificate cannot be read: ")


def test_a_certificate_that_a_pinned_authority_has_signed_passes_the_handshake(
    hosts: list[Identity], tmp_path: Path
) -> None:
    # Why both sides compare bytes, and why authorities are not pinned.
    authority = key_file(tmp_path / "ca")
    der = ssl.PEM_cert_to_DER_cert(authority.with_suffix(".crt").read_text())
    signed = read_identity(signed_key_file(tmp_path / "signed", authority))
    server = coordinator_context(hosts[0], [der])
    assert handshake(member_context(signed, [hosts[0].certificate]), server)[1] == signed.certificate != der


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(hosts: list[Identity], mode: int, tmp_path: Path) -> None:
    copy = tmp_path / "key.pem"
    copy.write_bytes(hosts[0].path.read_bytes())
    copy.chmod(mode)
    with pytest.raises(
        UsageError, match=rf"^{copy}: other users can read the key \(mode 0{mode:o}\): chmod 600 {copy}$"
    ):
        read_identity(copy)


def test_what_is_no_identity(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("-----BEGIN CERTIFICATE-----")
    for name in ("key.pem", "none.pem"):
        with pytest.raises(UsageError, match=f"^{tmp_path}/{name}: not a private key with its certificate: "):
            read_identity(tmp_path / name)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match=r"^making keys needs the extra cluster: pip install 'luce-llm\[cluster\]'$"):
        ClusterFiles("home").identity("coordinator.pem")


def test_the_directory_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = tmp_path / "luce" / "cluster" / "home"
    with pytest.raises(UsageError, match=f"^cluster home: {folder}: No such file"):
        ClusterFiles("home", make=False)
    files = ClusterFiles("home")
    first = files.identity("coordinator.pem")
    assert files.identity("coordinator.pem") == first and clusters() == ["home"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(first.path.stat().st_mode) == 0o600
    folder.chmod(0o710)
    with pytest.raises(UsageError, match=rf"^{folder}: other users can enter it \(mode 0710\): chmod 700 {folder}$"):
        ClusterFiles("home")


def test_one_coordinator_has_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    files = ClusterFiles("home")
    with open(files.lock("lock", "another server")):
        with pytest.raises(UsageError, match=r"^cluster home: another server of this cluster runs here$"):
            files.lock("lock", "another server")
        with open(ClusterFiles("other").lock("lock", "another server")):
            pass
    with open(files.lock("lock", "another server")):
        pass


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    files = ClusterFiles("home")
    files.write("tokens.json", [1])

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(UsageError, match=r"tokens.json: No space left on device$"):
            files.write("tokens.json", [2])
    assert files.read("tokens.json", list[int]) == [1] and [p.name for p in files.path.iterdir()] == ["tokens.json"]
    with pytest.raises(UsageError, match=r"tokens.json: Expected `str`, got `int`"):
        files.read("tokens.json", list[str])


@pytest.mark.parametrize("name", ["", "-a", "a/b", "..", "Home", "a" * 33, "a\n", "ä"])
def test_names_that_no_cluster_has(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert not is_cluster_name(name)
    with pytest.raises(UsageError, match=r"a name has a\.\.z, 0\.\.9 and -, at most 32 of them$"):
        ClusterFiles(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hostname", "name"),
    [("Box.lan", "box"), ("a_b c", "a-b-c"), ("..", "member"), ("x" * 99, "x" * 24), ("", "member")],
)
def test_names_of_members(hostname: str, name: str) -> None:
    assert member_name(hostname) == name and is_cluster_name(f"{name}-100")
