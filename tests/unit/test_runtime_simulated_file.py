"""The file of simulated devices: what is wrong with it in one line, which names the file and the field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from luce.errors import UsageError
from luce.runtime.simulated_file import read_simulated

WAY = {"latency": 1e-5, "bandwidth": 1e10}
CARD = {
    "name": "24 GB card",
    "free": 24 << 30,
    "read": 8e11,
    "rates": {"1": 1e12, "512": 1e14},
    "launch": 2e-6,
    "step": 4e-5,
    "way": WAY,
}


def link(before: str, behind: str, **more: Any) -> dict[str, Any]:
    return {"from": before, "to": behind, **WAY, **more}


def test_devices_and_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "sim.json"
    monkeypatch.setenv("LUCE_SIM_DEVICES", str(path))
    more = {"unpack": 1e12, "state_read": 1e11, "gather": {"1": 0.5}, "computes": True}
    path.write_text(json.dumps({"devices": [CARD, CARD | more], "links": [link("sim:1", "sim:0", latency=1)]}))
    found = read_simulated()
    first, second = found.devices
    assert first.rates == {1: 1e12, 512: 1e14} and first.way.bandwidth == 1e10
    assert (first.unpack, first.computes, second.unpack, second.computes) == (None, False, 1e12, True)
    assert found.link("sim:0", "sim:1") is None
    there = found.link("sim:1", "sim:0")
    assert there is not None and there.latency == 1


def test_the_file_of_the_documentation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/internals/placement.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", page.partition("## Simulated devices")[2], re.DOTALL)
    path = tmp_path / "sim.json"
    path.write_text(example)
    monkeypatch.setenv("LUCE_SIM_DEVICES", str(path))
    found = read_simulated()
    assert len(found.devices) == 2 and found.link("sim:0", "sim:1") is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "Object missing required field `devices`"),
        ({"devices": []}, "devices: Expected `array` of length >= 1"),
        ({"devices": [CARD, CARD | {"read": 0}]}, "devices[1].read: Expected `float` > 0.0"),
        ({"devices": [CARD | {"read": "fast"}]}, "devices[0].read: Expected `float`, got `str`"),
        ({"devices": [CARD | {"read": True}]}, "devices[0].read: Expected `float`, got `bool`"),
        ({"devices": [CARD | {"read": 1e30}]}, "devices[0].read: Expected `float` <= 1e+18"),
        ({"devices": [CARD | {"free": -1}]}, "devices[0].free: Expected `int` >= 0"),
        ({"devices": [CARD | {"rates": {}}]}, "devices[0].rates: Expected `object` of length >= 1"),
        ({"devices": [CARD | {"rates": {"0": 1.0}}]}, "key in devices[0].rates: Expected `int` >= 1"),
        ({"devices": [CARD | {"speed": 1}]}, "devices[0]: Object contains unknown field `speed`"),
        ({"devices": [CARD | {"way": {"latency": 1e-5}}]}, "devices[0].way: Object missing required field `bandwidth`"),
        ({"devices": [CARD], "links": [link("sim:0", "sim:1")]}, "links[0].to: sim:1 is none of sim:0"),
        ({"devices": [CARD], "links": [link("sim:7", "sim:0")]}, "links[0].from: sim:7 is none of sim:0"),
        ({"devices": [CARD], "links": [link("sim:0", "sim:0")]}, "links[0].to: sim:0 is where the link comes from"),
        (
            {"devices": [CARD, CARD], "links": [link("sim:0", "sim:1")] * 2},
            "links[1]: a second link from sim:0 to sim:1",
        ),
    ],
    ids=str,
)
def test_a_bad_file_is_one_line(
    content: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "sim.json"
    path.write_text(json.dumps(content))
    monkeypatch.setenv("LUCE_SIM_DEVICES", str(path))
    with pytest.raises(UsageError) as caught:
        read_simulated()
    assert str(caught.value) == f"LUCE_SIM_DEVICES: {path}: {message}"


def test_no_file_and_no_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "sim.json"
    monkeypatch.setenv("LUCE_SIM_DEVICES", str(path))
    with pytest.raises(UsageError, match=f"^LUCE_SIM_DEVICES: {path}: No such file or directory$"):
        read_simulated()
    path.write_bytes(b"{devices")
    with pytest.raises(UsageError, match=f"^LUCE_SIM_DEVICES: {path}: JSON is malformed"):
        read_simulated()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=f"^LUCE_SIM_DEVICES: {path}: "):
        read_simulated()
    monkeypatch.delenv("LUCE_SIM_DEVICES")
    with pytest.raises(UsageError, match=r"^LUCE_SIM_DEVICES: names no file"):
        read_simulated()
