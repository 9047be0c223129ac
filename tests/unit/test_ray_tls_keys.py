"""Keys for Ray's TLS: an authority of the cluster, and a pair for each machine that names its address."""

from __future__ import annotations

import ssl
import stat
import sys
from pathlib import Path

import pytest

from luce.cli.main import main
from luce.errors import UsageError
from luce.ray.tls_keys import make_keys, ray_settings


def shaken(server: Path, client: Path, address: str, name: str) -> str:
    """What both sides say of a handshake as Ray makes it: mutual, the client compares the address `name`."""
    ends = [ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)]
    ends[0].verify_mode = ssl.CERT_REQUIRED
    for context, folder in zip(ends, (server, client), strict=True):
        context.load_cert_chain(folder / f"{address}.pem", folder / f"{address}.key")
        context.load_verify_locations(folder / "authority.pem")
    one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [ends[0].wrap_bio(one, other, server_side=True), ends[1].wrap_bio(other, one, server_hostname=name)]
    done = set[int]()
    for _ in range(10):
        for number, side in enumerate(sides):
            try:
                side.do_handshake()
                done.add(number)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                return str(error.reason)
    # In TLS 1.3 a server refuses a client's certificate when the client is done.
    return "shaken" if done == {0, 1} else "waits"


def test_machines_of_an_authority_know_each_other_by_their_addresses(tmp_path: Path) -> None:
    files = make_keys(tmp_path / "a", "10.0.0.1")
    assert [path.name for path in files] == ["authority.pem", "10.0.0.1.key", "10.0.0.1.pem"]
    make_keys(tmp_path / "a", "10.0.0.2")
    for address in ("10.0.0.1", "10.0.0.2"):
        for name in (address, "127.0.0.1", "localhost"):
            assert shaken(tmp_path / "a", tmp_path / "a", address, name) == "shaken"
    assert shaken(tmp_path / "a", tmp_path / "a", "10.0.0.1", "10.0.0.2") == "CERTIFICATE_VERIFY_FAILED"
    # Another cluster's authority vouches for nobody here, whichever side it is.
    make_keys(tmp_path / "b", "10.0.0.1")
    assert shaken(tmp_path / "a", tmp_path / "b", "10.0.0.1", "10.0.0.1") == "CERTIFICATE_VERIFY_FAILED"
    foreign = tmp_path / "c"
    make_keys(foreign, "10.0.0.1")
    (foreign / "authority.pem").write_bytes((tmp_path / "a" / "authority.pem").read_bytes())
    assert shaken(tmp_path / "a", foreign, "10.0.0.1", "10.0.0.1") == "CERTIFICATE_VERIFY_FAILED"


def test_what_a_machine_has_signed_is_nobodys(tmp_path: Path) -> None:
    from cryptography import x509

    files = make_keys(tmp_path, "10.0.0.1")
    for path, authority in ((files[0], True), (files[2], False)):
        found = x509.load_pem_x509_certificate(path.read_bytes()).extensions
        constraints = found.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical and constraints.value.ca is authority


def test_keys_are_made_once_and_are_this_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    authority, key, certificate = make_keys(folder, "10.0.0.1")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (key, folder / "authority.key")} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = key.read_bytes()
    with pytest.raises(UsageError, match=r"10\.0\.0\.1\.key: there already; remove it"):
        make_keys(folder, "10.0.0.1")
    assert key.read_bytes() == before
    assert ray_settings(folder, "10.0.0.1") == {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_CA_CERT": str(authority),
    }
    with pytest.raises(UsageError, match=r"10\.0\.0\.2\.key: No such file or directory; `luce ray keys` makes it"):
        ray_settings(folder, "10.0.0.2")
    key.chmod(0o640)
    with pytest.raises(UsageError, match=r"other users can read it \(mode 0640\)"):
        ray_settings(folder, "10.0.0.1")
    # Without the authority's key, which need not stay on the head, no pair is made.
    (folder / "authority.key").unlink()
    with pytest.raises(UsageError, match="make keys where the authority's was made"):
        make_keys(folder, "10.0.0.2")


def test_the_command_makes_keys_and_says_what_to_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ray.toml"
    text = f'model = "x"\n[luce_python]\ncpu = "{sys.executable}"\n[head]\naddress = "10.0.0.1"\n'
    path.write_text(text)
    assert main(["ray", "keys", str(path)]) == 2 and "head.tls_folder" in capsys.readouterr().err
    path.write_text(f'{text}tls_folder = "{tmp_path}/keys"\n')
    assert main(["ray", "keys", str(path)]) == 0
    assert main(["ray", "keys", str(path), "--node", "10.0.0.2"]) == 0
    out = capsys.readouterr().out
    assert "copy these to" in out and f"{tmp_path}/keys/10.0.0.2.key" in out
    assert "authority.key" not in out
    assert sorted(each.name for each in (tmp_path / "keys").iterdir()) == sorted(
        f"{name}.{ending}" for name in ("authority", "10.0.0.1", "10.0.0.2") for ending in ("key", "pem")
    )
