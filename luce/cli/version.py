"""What `luce --version` says: the version, the commit, and the extras that are installed."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import luce

_DISTRIBUTION = "luce-llm"


def version_line() -> str:
    """One line, such as `luce 0.1.0 (commit 1a2b3c4d5e6f, extras cuda13)`."""
    return f"luce {luce.__version__} (commit {_commit() or 'unknown'}, extras {', '.join(extras()) or 'none'})"


def extras() -> list[str]:
    """The extras of Luce all of whose own requirements are installed; the test tools are no extra of users."""
    try:
        own = importlib.metadata.metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
        requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    wanted: dict[str, list[str]] = {extra: [] for extra in own if extra != "test"}
    for requirement in requirements:
        found = re.match(r"([\w.-]+).*;.*\bextra == ['\"]([\w.-]+)['\"]", requirement)
        if found and found[2] in wanted:
            wanted[found[2]].append(found[1])
    return [extra for extra, names in wanted.items() if names and all(map(_installed, names))]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _commit() -> str:
    """The commit of this package: from its build, else from the checkout that it lies in; "" if neither tells it."""
    package = Path(luce.__file__).parent
    built = package / "commit.txt"
    if built.exists():
        return built.read_text(encoding="utf-8").strip()
    if not (package.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(package.parent), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
