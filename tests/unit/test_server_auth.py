"""Sources of keys, and keys that stay valid if a file becomes invalid."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.config.settings import Config
from luce.errors import AuthError, ForbiddenError, UsageError
from luce.server.auth import Cors, HostCheck, Keys, is_loopback
from tests.support.key_files import write_keys


def accepts(keys: Keys, key: str) -> bool:
    try:
        keys.check({"x-api-key": key})
    except AuthError:
        return False
    return True


def test_without_any_key_everybody_may() -> None:
    assert not Keys(Config()).required and accepts(Keys(Config()), "x")


def test_a_credential_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_keys(tmp_path / "api-keys", "a:one\ntwo\n", 0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    keys = Keys(Config())
    assert keys.required and accepts(keys, "one") and accepts(keys, "two") and not accepts(keys, "a:one")


def test_a_credential_that_cannot_be_read_never_opens_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file in the place of the directory: for root, permissions refuse nothing.
    (tmp_path / "file").touch()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=f"credential {tmp_path}/file/api-keys: Not a directory"):
        Keys(Config())


def test_a_renewal_is_nothing_without_a_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_keys(tmp_path / "api-keys", "two\n")
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    assert not Keys(Config()).required


@pytest.mark.parametrize("content", [None, b"", b"# only this\n", b"name:\n", b"::\n"])
def test_a_file_without_keys_never_opens_the_server(tmp_path: Path, content: bytes | None) -> None:
    file = write_keys(tmp_path / "keys", "good\n")
    keys = Keys(Config(api_key_file=file))
    file.unlink()
    if content is not None:
        write_keys(file, content)
    with pytest.raises(UsageError, match="--api-key-file"):
        keys.reload()
    assert accepts(keys, "good") and not accepts(keys, "")
    with pytest.raises(UsageError, match="--api-key-file"):
        Keys(Config(api_key_file=file))


@pytest.mark.parametrize(
    "line",
    [
        "name:sesame:amdin",
        "name:sesame:admin:admin",
        "name:sesame:",
        "name::admin",
        "sesame:admin",
        ":",
        "n:sesame:ADMIN",
    ],
)
def test_a_line_that_is_not_understood_is_refused_without_its_content(tmp_path: Path, line: str) -> None:
    file = write_keys(tmp_path / "keys", f"one\n# comment\n{line}\n")
    with pytest.raises(UsageError) as caught:
        Keys(Config(api_key_file=file))
    expected = f"--api-key-file {file}: line 3: expected KEY, NAME:KEY or NAME:KEY:admin"
    assert str(caught.value) == expected and caught.value.exit_code == 2


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = write_keys(tmp_path / "keys", "sesame\n")
    keys = Keys(Config(api_key_file=file))
    file.chmod(mode)
    with pytest.raises(UsageError) as caught:
        keys.reload()
    assert str(caught.value) == f"--api-key-file {file}: other users can read or change it; run chmod 600"
    assert accepts(keys, "sesame")


def test_keys_may_be_any_bytes(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys", b"k\xff\xfe\r\n")
    keys = Keys(Config(api_key_file=file))
    assert accepts(keys, b"k\xff\xfe".decode(errors="surrogateescape")) and not accepts(keys, "k")


def test_keys_are_not_stored_in_plain_text() -> None:
    keys = Keys(Config(api_key=("sesame-open",)))
    assert "sesame" not in repr(vars(keys))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_addresses_that_others_reach(host: str) -> None:
    assert not is_loopback(host)


def test_several_hosts_are_names_of_the_server() -> None:
    check = HostCheck(Config(host=("127.0.0.2", "127.0.0.3", "[::1]")))
    for name in ("127.0.0.2:80", "127.0.0.3", "[::1]:80", "localhost"):
        check.check(name)
    with pytest.raises(ForbiddenError):
        check.check("evil.example")


def test_one_address_that_others_reach_is_enough_to_be_public() -> None:
    hosts = ("127.0.0.1", "192.168.1.2")
    HostCheck(Config(host=hosts)).check("box.lan")
    assert not Cors(Config(host=hosts), keyed=False).headers("http://localhost:1", None)
    assert Cors(Config(host=hosts[:1]), keyed=False).headers("http://localhost:1", None)
