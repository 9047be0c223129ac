"""The files in systemd/: in step with the settings, valid, and closed as far as a GPU server can be."""

from __future__ import annotations

import configparser
import re
import shutil
import sys
from pathlib import Path

from luce.config.file import sample
from luce.config.resolve import resolve
from luce.config.settings import FIELDS, Config
from tests.support.systemd_units import check_exposure, check_units, needs_systemd

FOLDER = Path(__file__).parents[2] / "systemd"


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


def installed(folder: Path) -> list[Path]:
    """Copies of the units whose command exists on this machine: the service, and its socket."""
    text = (FOLDER / "luce.service").read_text()
    (folder / "luce.service").write_text(text.replace("/opt/luce/bin/luce", sys.executable))
    shutil.copy(FOLDER / "luce.socket", folder)
    return [folder / "luce.service", folder / "luce.socket"]


@needs_systemd
def test_the_units_are_valid(tmp_path: Path) -> None:
    check_units(installed(tmp_path))


@needs_systemd
def test_the_service_is_closed(tmp_path: Path) -> None:
    check_exposure(installed(tmp_path)[0])


def test_the_unit_writes_no_core_files() -> None:
    # A core would hold prompts and keys.
    assert "LimitCORE=0" in (FOLDER / "luce.service").read_text().splitlines()
