"""What systemd's own tools say of units."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (systemd)")

#: of 10, measured 1.8 with systemd 252. The rest is needed: the network (1.1), device nodes and their groups (0.4),
#: /proc and netlink for drivers (0.4), executable memory for kernel builds (0.1), the affinity and NUMA policy of
#: threads (0.2), the host's users and root (0.3). Each other setting weighs 0.1 to 0.4: two that are missing fail.
EXPOSURE = 1.9


def check_units(paths: Iterable[Path]) -> None:
    """Raises AssertionError for what systemd would refuse or ignore."""
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr


def check_exposure(service: Path) -> None:
    """Raises AssertionError for a service that is more exposed than EXPOSURE."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE * 10:.0f}"]
    done = subprocess.run([*command, str(service)], capture_output=True, text=True, check=False)
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found and float(found[1]) <= EXPOSURE and done.returncode == 0, done.stdout + done.stderr
