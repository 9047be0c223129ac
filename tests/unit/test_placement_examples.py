"""The worked examples of docs/guide/placement.md: each command prints what the page shows."""

from __future__ import annotations

import itertools
import re
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luce.backend.measured_devices import MeasuredDevices, ModelOnDevices
from luce.cli import plan, predicted_plan
from luce.cli.main import main
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.runtime.device import Memory
from luce.runtime.host import HostDevice
from tests.support.published import PUBLISHED

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "placement.md"
#: command and output
EXAMPLES = re.findall(r"^```console\n\$ luce (.*?[^\\])\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


class Packed(HostDevice):
    """A device that holds weights and keys as GPUs do."""

    packed = True
    kv_dtype = np.dtype(np.float16)


class Cpu(HostDevice):
    """A CPU that keeps weights packed, with so much memory."""

    packed = True

    def memory(self) -> Memory:
        return Memory(18 << 30, 32 << 30)


#: of two cores of a server (AMD EPYC with AVX-512), rounded
FIGURES = FormatProfile(
    read=36e9,
    rates={1: 125e9, 16: 270e9, 512: 290e9, 2048: 230e9},
    unpack=None,
    spread=0.02,
    noisy=False,
    gather={1: 0.8, 16: 0.8, 128: 0.9},
    layer=4e-5,
)


def figures(model: ModelOnDevices, **how: Any) -> MeasuredDevices:
    """The figures of that CPU, measured today."""
    found = DeviceProfile(
        "cpu:0",
        "two cores",
        time.time(),
        step=5e-6,
        launch=3e-8,
        way=LinkProfile(1e-6, 1e10),
        formats={type.name: FIGURES for type in model.types},
        state_read=18e9,
        attention=35e9,
        elementwise=40e9,
        recurrence=90e9,
        recurrence_row=24e9,
        routing=3.3e-5,
    )
    return MeasuredDevices({"cpu:0": found})


def printed(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `luce` prints for a command of the page, whose file is the header of a published model."""
    words = shlex.split(command)
    (name,) = (word for word in words if word.endswith(".gguf"))
    path = next(model for model in PUBLISHED if f"{model.name}.gguf" == name).write(folder)
    assert main([str(path) if word == name else word for word in words]) == 0
    return "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_an_example_prints_what_the_page_shows(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    # The devices of the machine take no part.
    monkeypatch.setattr(plan, "open_placement", lambda config: [Cpu() if "cpu:0" in command else Packed()])
    monkeypatch.setattr(predicted_plan, "measured", figures)
    assert printed(command, tmp_path, capsys) == output


def test_the_page_has_an_example_of_each_kind() -> None:
    text = PAGE.read_text("utf-8")
    kinds = (
        "Two vendors",
        "A slow third card",
        "Another machine over 1 Gbit/s",
        "An integrated GPU",
        "A mixture-of-experts",
    )
    places = [text.index(f"**{kind}") for kind in kinds]
    assert places == sorted(places)
    for begin, end in itertools.pairwise([*places, len(text)]):
        assert "```console\n$ luce plan" in text[begin:end]
