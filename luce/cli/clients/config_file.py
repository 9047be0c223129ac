"""A configuration file of another program, which its user may have written."""

from __future__ import annotations

import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from luce.cli.clients.formats import Format, FormatProblem, Json
from luce.cli.user_files import write
from luce.errors import UsageError


@dataclass(frozen=True)
class ConfigFile:
    """What a file gets."""

    path: Path
    format: Format
    changes: Json
    #: whether the changes hold a key: nobody else may read the file then
    secret: bool

    def addition(self) -> str:
        """What a file that does not exist would hold. Raises UsageError for a value that the format cannot hold."""
        return self._edited("")

    def check(self) -> None:
        """Raises what `save` would raise, and writes nothing."""
        self._edited(self._read() or "")

    def save(self) -> Path | None:
        """Put the changes into the file.

        Returns the backup of what was there, the file itself if it is new, None if it had the changes. Raises
        UsageError, with the file as it was, if it cannot be read, parsed, or changed without touching the rest.
        """
        old = self._read()
        new = self._edited(old or "")
        if new == old:
            return None
        # A link to a file stays one.
        path = self.path.resolve()
        if old is None:
            write(path, new.encode())
            return self.path
        mode = stat.S_IMODE(path.stat().st_mode) & (0o700 if self.secret else 0o777)
        backup = _back_up(path)
        write(path, new.encode(), mode)
        return backup

    def _read(self) -> str | None:
        """The text of the file, None if there is none."""
        try:
            return self.path.read_bytes().decode()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise self._untouched("is not UTF-8") from None

    def _edited(self, text: str) -> str:
        try:
            return self.format.edit(text, self.changes)
        except FormatProblem as problem:
            raise self._untouched(str(problem)) from None

    def _untouched(self, problem: str) -> UsageError:
        return UsageError(f"{self.path}: {problem}; it is left as it was")


def _back_up(path: Path) -> Path:
    """A copy beside a file, under a name that is free. Raises UsageError."""
    names = (path.with_name(f"{path.name}.bak{number or ''}") for number in range(1000))
    backup = next((name for name in names if not name.exists()), None)
    if backup is None:
        raise UsageError(f"{path}: has a thousand backups; it is left as it was")
    try:
        shutil.copy2(path, backup)
    except OSError as error:
        raise UsageError(f"{backup}: {error.strerror}") from None
    return backup
