"""Files that verbs write for their users."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from luce.errors import UsageError


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file atomically, with the directories above it. Raises UsageError naming the file."""
    temporary: Any = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
            temporary.write(content)
            temporary.flush()
            os.fchmod(temporary.fileno(), mode)
            os.fsync(temporary.fileno())
        os.replace(temporary.name, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary.name).unlink(missing_ok=True)
        raise UsageError(f"{path}: {error.strerror}") from None
