"""Access: API keys, the Host check against DNS rebinding, and CORS."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from luce.config.environment import environment
from luce.config.settings import Config
from luce.errors import AuthError, ForbiddenError, UsageError

#: paths that need no key
OPEN_PATHS = frozenset({"/", "/health", "/livez"})

_ADMIN = b"admin"
# Permissions of other users than the owner. A group may read: so does systemd's credential.
_OTHERS = stat.S_IRWXO | stat.S_IWGRP
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Keys:
    """The accepted API keys, stored as SHA-256. Sources: --api-key, --api-key-file, systemd's credential `api-keys`.

    A credential is what it was when the service started. A reload of the unit puts the present keys into the service's
    runtime directory, under the same name, and they take the credential's place.

    A line of a file is `key`, `name:key` or `name:key:admin`; empty lines and lines that begin with # are skipped. Keys
    of --api-key are an admin's too.
    """

    def __init__(self, config: Config) -> None:
        self._configured = [_digest(key.encode()) for key in config.api_key]
        self._file = config.api_key_file
        self._credential, self._renewed = map(_in_directory, ("CREDENTIALS_DIRECTORY", "RUNTIME_DIRECTORY"))
        self._digests: list[bytes] = []
        self._admins: list[bytes] = []
        self.reload()

    def reload(self) -> None:
        """Read the files again. Raises UsageError and changes no key if a file has no key or cannot be read."""
        digests, admins = list(self._configured), list(self._configured)
        for origin, path in self._files():
            found = _read(origin, path)
            digests += [digest for digest, _ in found]
            admins += [digest for digest, admin in found if admin]
        self._digests, self._admins = digests, admins

    def _files(self) -> list[tuple[str, Path]]:
        """The present files of keys."""
        files = [] if self._file is None else [("--api-key-file", self._file)]
        if self._credential is not None and _is_there(self._credential):
            present = self._credential
            if self._renewed is not None and _is_there(self._renewed):
                present = self._renewed
            files.append(("credential", present))
        return files

    @property
    def required(self) -> bool:
        """Whether requests need a key: if there is any."""
        return bool(self._digests)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises AuthError unless a header carries a key (`Authorization: Bearer`, `x-api-key`, `api-key`)."""
        if self.required and not _known(_presented(headers), self._digests):
            raise AuthError("wrong API key")

    def holder(self, headers: Mapping[str, str]) -> str:
        """A name for the key that a header carries, which does not reveal it; empty without keys. Raises AuthError."""
        return _presented(headers).hex()[:16] if self.required else ""

    def is_admin(self, key: str) -> bool:
        """Whether this is an admin's key."""
        return _known(_digest(key.encode(errors="surrogateescape")), self._admins)

    def check_admin(self, headers: Mapping[str, str], remote: str) -> None:
        """Raises ForbiddenError unless a header has an admin's key; without keys, if `remote` is another machine."""
        if not self.required:
            if not is_loopback(remote):
                raise ForbiddenError("without API keys, only clients on this machine may do this")
        elif not _known(_presented(headers), self._admins):
            raise ForbiddenError("this requires an admin's API key")


def _presented(headers: Mapping[str, str]) -> bytes:
    """The digest of a request's key. Raises AuthError if there is none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    presented = token.strip() if scheme.lower() == "bearer" else ""
    presented = presented or headers.get("x-api-key") or headers.get("api-key") or ""
    if not presented:
        raise AuthError("missing API key: send `Authorization: Bearer KEY`")
    return _digest(presented.encode(errors="surrogateescape"))


def _known(digest: bytes, digests: Sequence[bytes]) -> bool:
    # Compares all of them, so that the time does not reveal which one matched.
    return bool(sum(hmac.compare_digest(digest, known) for known in digests))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _in_directory(variable: str) -> Path | None:
    """The file of keys in a directory that systemd names."""
    directory = environment(variable)
    return None if directory is None else Path(directory) / "api-keys"


def _is_there(path: Path) -> bool:
    """Whether there is a file. One that may not be looked at is: it is an error then, not a server without keys."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _read(origin: str, path: Path) -> list[tuple[bytes, bool]]:
    """Digests of the keys of a file, and whether each is an admin's. The errors name a line, never what is in it."""
    where = f"{origin} {path}"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read().splitlines()
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}", param="api_key_file") from None
    if mode & _OTHERS:
        raise UsageError(f"{where}: other users can read or change it; run chmod 600", param="api_key_file")
    keys = []
    for number, line in enumerate(map(bytes.strip, lines), 1):
        if not line or line.startswith(b"#"):
            continue
        parts = line.split(b":")
        key = parts[0] if len(parts) == 1 else parts[1]
        # `KEY:admin` would make `admin` a key.
        if not key or key == _ADMIN or parts[2:] not in ([], [_ADMIN]):
            expected = "expected KEY, NAME:KEY or NAME:KEY:admin"
            raise UsageError(f"{where}: line {number}: {expected}", param="api_key_file")
        keys.append((_digest(key), len(parts) == 3))
    if not keys:
        raise UsageError(f"{where}: contains no key", param="api_key_file")
    return keys


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HostCheck:
    """Prevents DNS rebinding: a web page could reach a loopback server without keys under its own host name."""

    def __init__(self, config: Config) -> None:
        self._active = all(map(is_loopback, config.host))
        named = {host.strip("[]") for host in config.host} | set(config.allowed_host)
        self._names = _LOCAL_NAMES | {name.lower() for name in named}

    def check(self, host: str | None) -> None:
        """Raises ForbiddenError for a Host header that does not name this server."""
        if self._active and host is not None and _name(host) not in self._names:
            raise _not_this_server()

    def check_admin(self, host: str | None) -> None:
        """The same on every address, for what only this machine may do without a key; an IP address is also right."""
        if host is not None and (name := _name(host)) not in self._names and not _is_address(name):
            raise _not_this_server()


def _authority(origin: str) -> str:
    """`name:port` of an Origin header, `none` of one without."""
    try:
        return urlsplit(origin).netloc.lower() or "none"
    except ValueError:
        return "none"


def _not_this_server() -> ForbiddenError:
    return ForbiddenError("this Host header is not accepted here; see --allowed-host", param="host")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """The name of a Host header without the port: `[::1]:80` is `::1`."""
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:
        return ""


class Cors:
    """The browser origins whose pages may call the server: those of --cors-origin, and the server's own.

    Without the flag, only pages from this machine (http://localhost:...) may, and only if the server listens on
    loopback addresses alone and needs no key.
    """

    def __init__(self, config: Config, *, keyed: bool) -> None:
        self._origins = frozenset(config.cors_origin)
        self._local = not config.cors_origin and not keyed and all(map(is_loopback, config.host))

    def check(self, origin: str | None, host: str | None) -> None:
        """Raises ForbiddenError for a request that a page of another origin sends. Browsers send some of them without
        asking first, and only keep the response from the page."""
        if origin is None or self._allows(origin) or _authority(origin) == (host or "").lower():
            return
        raise ForbiddenError("pages of this Origin may not call this server; see --cors-origin", param="origin")

    def headers(self, origin: str | None, requested: str | None) -> dict[str, str]:
        """Headers of the response to a request from `origin` that asks to send the headers `requested`."""
        if origin is None or not self._allows(origin):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Vary": "Origin",
            "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": requested or "authorization, content-type, x-api-key",
            "Access-Control-Expose-Headers": "x-request-id, request-id, retry-after",
            "Access-Control-Max-Age": "600",
        }

    def _allows(self, origin: str) -> bool:
        if self._local:
            return _name(origin.partition("://")[2]) in _LOCAL_NAMES
        return "*" in self._origins or origin in self._origins
