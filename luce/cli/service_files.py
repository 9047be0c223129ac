"""The files of a systemd service: units made of those in systemd/, settings, and keys."""

from __future__ import annotations

import grp
import hashlib
import importlib.resources
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from luce.config.file import sample
from luce.errors import UsageError

_MARK = "# Written by `luce service install`; digest "
#: what a user's own manager can do without privileges; its services read the user's files anyway
_USERS_OWN = frozenset(
    (
        *("Type", "NotifyAccess", "ExecStart", "ExecReload", "WatchdogSec", "TimeoutStartSec", "TimeoutStopSec"),
        *("KillMode", "Restart", "RestartSec", "RestartPreventExitStatus", "StateDirectory", "StateDirectoryMode"),
        *("CacheDirectory", "CacheDirectoryMode", "RuntimeDirectory", "RuntimeDirectoryMode", "UMask"),
        *("NoNewPrivileges", "LockPersonality", "RestrictRealtime", "RestrictSUIDSGID", "SystemCallArchitectures"),
        *("LimitNOFILE", "LimitCORE"),
    )
)
#: directories that ProtectHome hides
_HIDDEN = ("/home", "/root", "/run/user")


@dataclass(frozen=True)
class Service:
    """One service: that of the machine or of a user; a named one is an instance of the template luce@.service."""

    #: empty: luce.service with luce.socket
    instance: str
    user: bool
    #: where the paths begin; / except for a staged tree
    root: Path

    @property
    def unit(self) -> str:
        """What systemctl calls it."""
        return f"luce@{self.instance}.service" if self.instance else "luce.service"

    @property
    def units(self) -> tuple[str, ...]:
        """The units that are enabled."""
        return (self.unit,) if self.instance else ("luce.socket", self.unit)

    @property
    def unit_files(self) -> tuple[Path, ...]:
        """The files of the units."""
        names = ("luce@.service",) if self.instance else ("luce.socket", "luce.service")
        folder = Path.home() / ".config/systemd/user" if self.user else Path("/etc/systemd/system")
        return tuple(self._at(folder / name) for name in names)

    @property
    def settings(self) -> Path:
        """The TOML file."""
        return self._at(self._folder / f"{self.instance or 'luce'}.toml")

    @property
    def keys(self) -> Path | None:
        """The file of API keys; a user's own service listens to this machine only, and has none."""
        return None if self.user else self._at(self._folder / "api-keys")

    @property
    def _folder(self) -> Path:
        return Path.home() / ".config/luce" if self.user else Path("/etc/luce")

    def _at(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def text_of(self, path: Path) -> str:
        """The text of a unit file."""
        text = (_directory() / path.name.replace("@", "")).read_text(encoding="utf-8")
        if path.suffix == ".service":
            name = "%i" if self.instance else "luce"
            config = self._folder / f"{name}.toml"
            text = re.sub(r"^ExecStart=.*$", lambda _: f"ExecStart={_command()} {config}", text, flags=re.MULTILINE)
            if self.instance:
                text = text.replace("Description=Luce LLM server", "Description=Luce LLM server %i")
                # Not luce/%i: with DynamicUser, /var/lib/luce is a link to what luce.service has there.
                text = re.sub(
                    r"^(State|Cache|Runtime)Directory=luce$", r"\1Directory=luce-%i", text, flags=re.MULTILINE
                )
                text = re.sub(r"(%[Ct])/luce\b", r"\1/luce-%i", text)
            if self.user:
                text = _of_user(text)
            elif self.root == Path("/"):
                text = re.sub(r"^SupplementaryGroups=(.*)\n", _groups_here, text, flags=re.MULTILINE)
        return _marked(text)

    def settings_text(self, model: str, name: str, port: int | None) -> str:
        """The TOML file of a new service: all settings with their defaults, and a table for the model."""
        text = sample()
        if port is not None:
            text = re.sub(r"^# port = .*$", f"port = {port}", text, flags=re.MULTILINE)
        return f"{text}\n[models.{_toml(name)}]\nmodel = {_toml(model)}\npinned = true\n"


def new_key() -> str:
    """The line of a new key in a file of keys."""
    return f"first:{secrets.token_hex(24)}:admin\n"


def unchanged(path: Path) -> bool:
    """Whether a unit file is as `luce service install` wrote it."""
    first, _, rest = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    return first == _MARK + _digest(rest)


def readable_by_service(path: Path, what: str) -> Path:
    """A path. Raises UsageError if a service of the machine may not read it."""
    for folder in _HIDDEN:
        if path.is_relative_to(folder):
            raise UsageError(f"luce service install: {what} {path} is below {folder}, which the service may not read")
    return path


def interpreter() -> Path:
    """The environment that runs the service: this one."""
    return Path(sys.prefix)


def _command() -> str:
    """The beginning of the command line, up to the path of the settings."""
    script = Path(sys.prefix) / "bin" / "luce"
    words = [str(script)] if script.exists() else [sys.executable, "-m", "luce"]
    return " ".join([*map(_word, words), "serve", "--config"])


def _word(text: str) -> str:
    """A word of ExecStart."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"' if re.search(r"[\s;'\"]", text) else text


def _toml(text: str) -> str:
    """A string of TOML."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _groups_here(line: re.Match[str]) -> str:
    """SupplementaryGroups with the groups that this machine has: with any other one a service does not start."""
    found = [name for name in line[1].split() if _is_group(name)]
    return f"SupplementaryGroups={' '.join(found)}\n" if found else ""


def _is_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _of_user(text: str) -> str:
    """A unit of the machine as one of a user's manager."""
    lines = []
    for line in text.splitlines():
        key = line.partition("=")[0]
        in_service = (
            "=" in line and not line.startswith("#") and key not in ("Description", "Documentation", "WantedBy")
        )
        # With `+` a line needs the privileges of root.
        if line.startswith(("#", "ExecReload=-+")) or (in_service and key not in _USERS_OWN):
            continue
        lines.append("WantedBy=default.target" if key == "WantedBy" else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines) + "\n")


def _marked(text: str) -> str:
    return f"{_MARK}{_digest(text)}\n{text}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _directory() -> Path:
    """The folder of the units: inside the installed package, or beside it in a checkout."""
    package = Path(str(importlib.resources.files("luce")))
    inside = package / "systemd"
    return inside if inside.is_dir() else package.parent / "systemd"
