"""What setup.cfg cannot say: a wheel and a source distribution hold the commit that they are built from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
#: in the package; a source distribution has it, a checkout has not
COMMIT = "luce/commit.txt"


def commit() -> str:
    """The commit of the sources, "" if nothing tells it."""
    if (ROOT / COMMIT).exists():
        return (ROOT / COMMIT).read_text().strip()
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write(folder: str) -> None:
    """Add the commit to a package that is being built."""
    if found := commit():
        path = Path(folder) / COMMIT
        path.unlink(missing_ok=True)
        path.write_text(found + "\n")


class Build(build_py):
    """Copies the modules, and adds the commit."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write(self.build_lib)


class SourceDistribution(sdist):
    """Copies the sources, and adds the commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write(base_dir)


setup(cmdclass={"build_py": Build, "sdist": SourceDistribution})
