"""Files with API keys."""

from __future__ import annotations

from pathlib import Path


def write_keys(path: Path, content: str | bytes, mode: int = 0o600) -> Path:
    """A key file that only its owner can read, unless `mode` says otherwise."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path
