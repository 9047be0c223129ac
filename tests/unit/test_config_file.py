"""The files in systemd/: in step with the settings, valid, and closed as far as a GPU server can be."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from luce.config.file import sample
from luce.config.resolve import resolve
from luce.config.settings import FIELDS, Config

FOLDER = Path(__file__).parents[2] / "systemd"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (systemd)")

#: of 10, measured 2.0 with systemd 252. The rest is needed: the network (0.8), device nodes and their groups (0.4),
#: /proc and netlink for drivers (0.4), executable memory for kernel builds (0.1), system calls that drivers pin memory
#: with (0.4), the host's users (0.2). Each other setting weighs 0.1 to 0.4: the test notices if two are missing.
EXPOSURE = 2.2


def test_the_sample_settings_are_those_of_the_code() -> None:
    assert (FOLDER / "luce.toml").read_text() == sample()


def test_the_sample_holds_the_defaults(tmp_path: Path) -> None:
    # Every commented-out setting, taken in, must be valid and change nothing.
    lines = [line[2:] for line in sample().splitlines() if re.match(r"# \w+ = ", line)]
    assert sorted(line.partition(" ")[0] for line in lines) == sorted(FIELDS)
    file = tmp_path / "all.toml"
    file.write_text("\n".join(line for line in lines if not line.endswith('""')))
    assert resolve({"config": file}, env={}) == Config()


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(FOLDER / "luce.service")
    return parser


def test_stopping_may_take_longer_than_draining() -> None:
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) > Config().drain_seconds + 10
    assert service["Type"] == "notify" and service["KillMode"] == "mixed"
    assert set(service["RestartPreventExitStatus"].split()) == {"2", "3"}


def installed(folder: Path) -> list[str]:
    """Copies of the units whose command exists on this machine."""
    text = (FOLDER / "luce.service").read_text()
    (folder / "luce.service").write_text(text.replace("/opt/luce/bin/luce", sys.executable))
    shutil.copy(FOLDER / "luce.socket", folder)
    return [str(folder / "luce.service"), str(folder / "luce.socket")]


@needs_systemd
def test_the_units_are_valid(tmp_path: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *installed(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr


@needs_systemd
def test_the_service_is_closed(tmp_path: Path) -> None:
    service, _ = installed(tmp_path)
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={EXPOSURE * 10:.0f}",
        service,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"exposure level for luce.service: ([0-9.]+)", done.stdout)
    assert found and float(found[1]) <= EXPOSURE and done.returncode == 0, done.stdout + done.stderr


def test_the_unit_writes_no_core_files() -> None:
    # A core would hold prompts and keys.
    assert "LimitCORE=0" in (FOLDER / "luce.service").read_text().splitlines()
