"""Texts in front of the next message: files, and the output of commands."""

from __future__ import annotations

import glob
import stat
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from luce.cli.repl.turn import Interrupt
from luce.config import values
from luce.errors import UsageError

#: a user is asked before larger texts are read, and larger ones than the second are refused
ASK_BYTES, MOST_BYTES = 100 << 10, 16 << 20


@dataclass(frozen=True)
class Attachment:
    """One text."""

    #: a path, or a command behind `!`
    name: str
    text: str


def path_of(text: str, origin: str) -> Path:
    """The path argument of a command. Raises UsageError that begins with `origin`."""
    try:
        return values.path(text)
    except ValueError as error:
        raise UsageError(f"{origin}: {error}, got {text!r}") from None


def file_size(path: Path, origin: str) -> int:
    """Bytes of a file that can be read whole. Raises UsageError that begins with `origin`."""
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"{origin} {path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{origin} {path}: not a regular file")
    if found.st_size > MOST_BYTES:
        raise UsageError(f"{origin} {path}: {found.st_size:,} bytes exceed the limit of {MOST_BYTES:,}")
    return found.st_size


def read_file(path: Path, origin: str) -> Attachment:
    """A text file. Raises UsageError that begins with `origin`."""
    file_size(path, origin)
    try:
        return Attachment(str(path), path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{origin} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{origin} {path}: not a text file in UTF-8") from None


def matches(pattern: str) -> list[Path]:
    """The regular files that a pattern finds, `**` through directories, in the order of their names."""
    pattern = str(path_of(pattern, "/glob"))
    found = sorted(path for name in glob.glob(pattern, recursive=True) if (path := Path(name)).is_file())
    if not found:
        raise UsageError(f"/glob {pattern}: no file matches")
    return found


def run_command(command: str, show: Callable[[str], None]) -> tuple[Attachment, int | None]:
    """The output of a shell command, which `show` gets line by line, and its exit status; None: Ctrl+C ended it."""
    lines: list[bytes] = []
    size = 0
    with (
        Interrupt() as interrupt,
        # Without input: a command must not read the messages of a pipe.
        subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as child,
    ):
        output = child.stdout
        assert output is not None
        try:
            while line := interrupt.wait(lambda: output.readline(1 << 16)):
                lines.append(line)
                show(line.decode(errors="replace").rstrip("\n"))
                size += len(line)
                if size > MOST_BYTES:
                    child.kill()
                    raise UsageError(f"!{command}: the output exceeds {MOST_BYTES:,} bytes")
            status: int | None = interrupt.wait(child.wait)
        except KeyboardInterrupt:
            child.kill()
            status = None
    text = b"".join(lines).decode(errors="replace")
    return Attachment(f"!{command}", f"$ {command}\n{text}"), None if interrupt.pressed else status


def schema_format(path: Path, origin: str) -> Mapping[str, Any]:
    """OpenAI's `response_format` for a file that holds a JSON schema. Raises UsageError that begins with `origin`."""
    try:
        schema = msgspec.json.decode(read_file(path, origin).text)
    except msgspec.DecodeError as error:
        raise UsageError(f"{origin} {path}: {error}") from None
    if not isinstance(schema, dict):
        raise UsageError(f"{origin} {path}: expected a JSON schema, which is an object")
    return {"type": "json_schema", "json_schema": {"name": "reply", "strict": True, "schema": schema}}
