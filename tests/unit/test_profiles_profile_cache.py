"""Stored profiles: what makes another key, what is measured again, and files that are not believed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from luce.profiles import profile_cache
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile, Observed, Phase
from luce.profiles.profile_cache import (
    note_observed,
    profile_key,
    profile_of,
    profile_path,
    read_profile,
    stored_profile,
)
from luce.profiles.timer import ExpertSizes, Measuring, ProfileSizes
from luce.runtime import kernels
from luce.runtime.device import DeviceName
from luce.runtime.gpu import GpuDevice
from luce.runtime.host import HostDevice

SIZES = ProfileSizes(1 << 15, 256, 1 << 20, (1, 16), 4, 1 << 12, 0.0, 64, 32, ExpertSizes(4, 2, 1 << 12, (1,)), 1)
SMALL = Measuring(SIZES)
Q8_0, Q4_0 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0
FOUND = FormatProfile(1e9, {1: 1e9, 16: 2e9}, None, 0.1, False)
PROFILE = DeviceProfile("cpu:0", "x", 1e9, 1e-5, 1e-6, LinkProfile(1e-6, 1e9), {"Q8_0": FOUND})
NOW = 1e9 + 5


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)


def stored(path: Path, **changes: Any) -> Path:
    """A file of PROFILE, with changed values by their dotted names."""
    content: dict[str, Any] = {"format": 3, "profile": json.loads(json.dumps(vars(PROFILE), default=vars))}
    for name, value in changes.items():
        *parents, last = name.split("__")
        at = content
        for parent in parents:
            at = at[parent]
        at[last] = value
    path.write_text(json.dumps(content))
    return path


def test_a_second_call_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=SMALL)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(profile_cache, "profile_device", None)
    assert profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=SMALL) == first
    # CPU devices are the same CPU.
    assert profile_of(HostDevice(1), [Q8_0], folder=tmp_path, how=SMALL) == replace(first, device="cpu:1")


def test_only_what_is_missing_is_measured_unless_all_is_asked_anew(tmp_path: Path) -> None:
    first = profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=SMALL)
    both = profile_of(HostDevice(), [Q8_0, Q4_0], folder=tmp_path, how=SMALL)
    assert both.formats["Q8_0"] == first.formats["Q8_0"]
    assert set(both.formats) == {"Q8_0", "Q4_0"}
    anew = profile_of(HostDevice(), [Q4_0], anew=True, folder=tmp_path, how=SMALL)
    assert set(anew.formats) == {"Q4_0"}


@pytest.mark.parametrize("changed", ["describe", "kernels", "sources", "cpu", "nodes", "blas"])
def test_whatever_speed_depends_on_makes_another_key(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = HostDevice()
    before = profile_key(device)
    assert profile_key(device) == before
    module: Any = profile_cache
    if changed == "describe":
        monkeypatch.setattr(HostDevice, "describe", lambda self: {"name": "another"})
    elif changed == "kernels":
        monkeypatch.setattr(kernels, "fingerprint", lambda: "another")
    elif changed == "blas":
        pool = {"user_api": "blas", "internal_api": "another", "version": "1", "num_threads": 1}
        monkeypatch.setattr(module.threadpoolctl, "threadpool_info", lambda: [pool])
    else:
        name = {"sources": "source_hash", "cpu": "cpu_model", "nodes": "numa_nodes"}[changed]
        monkeypatch.setattr(module, name, lambda: "another")
    assert profile_key(device) != before


class Card(GpuDevice):
    """What a key is made of, of a card that is not there."""

    def __init__(self, **changes: Any) -> None:
        own = {"name": "x", "driver": "1", "compiler": "2", "address": "0000:C1:00.0", "uuid": b"a", "watts": 350}
        own |= changes
        self.own, self.name = own, DeviceName("cuda", 0)
        runtime = SimpleNamespace(
            deviceGetPCIBusId=lambda index: own["address"], getDeviceProperties=lambda index: {"uuid": own["uuid"]}
        )
        self.cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))

    def describe(self) -> dict[str, str | int]:
        return {name: self.own[name] for name in ("name", "driver", "compiler")}


@pytest.mark.parametrize(
    "change",
    [{"driver": "3"}, {"compiler": "3"}, {"name": "y"}, {"address": "0000:C2:00.0"}, {"uuid": b"b"}, {"watts": 250}],
)
def test_whatever_a_card_depends_on_makes_another_key(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    card, other = Card(), Card(**change)
    keys = []
    for device in (card, other, card):
        monkeypatch.setattr(profile_cache, "power_limit", lambda kind, address, device=device: device.own["watts"])
        keys.append(profile_key(device))
    assert keys[0] == keys[2] != keys[1]
    # A limit within 10 W is the same.
    monkeypatch.setattr(profile_cache, "power_limit", lambda kind, address: 352)
    assert profile_key(card) == keys[0]


def test_a_stored_profile_is_read(tmp_path: Path) -> None:
    assert read_profile(stored(tmp_path / "a.json")) == PROFILE
    assert read_profile(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"profile__step": -1.0},
        {"profile__step": "1"},
        {"profile__way__bandwidth": 0.0},
        {"profile__way__latency": float("inf")},
        {"profile__formats__Q8_0__read": float("nan")},
        {"profile__formats__Q8_0__read": 0.0},
        {"profile__formats__Q8_0__rates": {}},
        {"profile__formats__Q8_0__rates": {"1": -2.0}},
        {"profile__formats__Q8_0__rates": {"0": 2.0}},
        {"profile__formats__Q8_0__rates": {"1": 1e30}},
        {"profile__way__bandwidth": 1e30},
        {"profile__formats__Q8_0__unpack": -2.0},
        {"profile__formats__Q8_0__gather": {"1": 0.0}},
        {"profile__formats__Q8_0__int8": {"512": 1e30}},
        {"profile__formats__Q8_0__int8_unpack": 0.0},
        {"profile__formats__Q8_0__layer": -1.0},
        {"profile__observed": {"prompt": {"ratio": 0.0, "steps": 3}}},
        {"profile__formats__Q8_0__spread": float("inf")},
        {"profile__state_read": 0.0},
        {"profile__attention": float("nan")},
        {"profile__elementwise": 0.0},
        {"profile__recurrence": 1e30},
        {"profile__recurrence_row": 0.0},
        {"profile__routing": -1.0},
        {"profile__observed": {"decode": {"ratio": -1.0, "steps": 3}}},
        {"profile__observed": {"neither": {"ratio": 1.0, "steps": 3}}},
    ],
)
def test_a_file_with_a_bad_figure_is_not_believed(
    tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "luce.profiles"):
        assert read_profile(stored(tmp_path / "a.json", **changes)) is None
    assert "profile_invalid" in caplog.text


def test_a_cut_file_is_not_believed(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.json")
    path.write_bytes(path.read_bytes()[:100])
    assert read_profile(path) is None


@pytest.mark.parametrize(("age", "known"), [(89 * 86400, True), (91 * 86400, False), (-100, False)])
def test_a_profile_counts_for_90_days(tmp_path: Path, age: float, known: bool) -> None:
    path = stored(tmp_path / "a.json", profile__measured=NOW - age)
    assert (read_profile(path) is not None) is known


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, "luce.profiles"):
        assert profile_of(HostDevice(), [Q8_0], folder=blocked / "profiles", how=SMALL).formats
    assert "profile_not_stored" in caplog.text


def test_both_phases_are_kept_where_threads_note_them_at_the_same_time(tmp_path: Path) -> None:
    for attempt in range(20):
        path = stored(tmp_path / f"{attempt}.json")
        phases: list[Phase] = ["decode", "prompt"]
        threads = [threading.Thread(target=note_observed, args=(path, p, Observed(1.25, 1))) for p in phases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_profile(path) == replace(PROFILE, observed=dict.fromkeys(phases, Observed(1.25, 1)))


def test_two_processes_that_write_at_the_same_time_leave_one_whole_profile(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.json")
    script = (
        "import sys, time; time.time = lambda: float(sys.argv[3]); from pathlib import Path;"
        "from luce.profiles.profile import Observed;"
        "from luce.profiles.profile_cache import note_observed;"
        "[note_observed(Path(sys.argv[1]), 'decode', Observed(float(sys.argv[2]), 1000)) for _ in range(100)]"
    )
    both = [replace(PROFILE, observed={"decode": Observed(ratio, 1000)}) for ratio in (1.25, 1.5)]
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), str(own.observed["decode"].ratio), str(NOW)])
        for own in both
    ]
    while any(writer.poll() is None for writer in writers):
        assert read_profile(path) in [PROFILE, *both]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert read_profile(path) in both
    # Nobody leaves a temporary file.
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_recurrences_are_measured_where_they_are_missing(tmp_path: Path) -> None:
    first = profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=SMALL)
    assert first.recurrence is None
    second = profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=replace(SMALL, recurrent=True))
    assert second.recurrence is not None
    assert second.recurrence > 0
    assert second.formats == first.formats
    # A later measurement of another type keeps them.
    third = profile_of(HostDevice(), [Q4_0], folder=tmp_path, how=SMALL)
    assert (third.recurrence, third.recurrence_row) == (second.recurrence, second.recurrence_row)
    assert third.recurrence_row is not None


def test_experts_are_measured_where_they_are_missing(tmp_path: Path) -> None:
    plain = profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=SMALL)
    assert plain.formats["Q8_0"].gather == {}
    experts = profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=replace(SMALL, experts=True))
    assert set(experts.formats["Q8_0"].gather) == {1}
    assert experts.routing > 0
    assert profile_of(HostDevice(), [Q4_0], folder=tmp_path, how=SMALL).routing == experts.routing
    experts = profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=SMALL)
    # Models without experts are predicted from it as well.
    assert profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=SMALL) == experts


def test_products_in_int8_are_measured_where_they_are_missing_and_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    profile_path(HostDevice()).parent.mkdir()
    stored(profile_path(HostDevice()))
    assert stored_profile(HostDevice(), [Q8_0], int8=True) is not None
    monkeypatch.setattr(profile_cache, "can_multiply_int8", lambda device, type: True)
    assert stored_profile(HostDevice(), [Q8_0], int8=True) is None
    assert stored_profile(HostDevice(), [Q8_0]) is not None


def test_what_servers_observed_is_kept_until_a_measurement_of_everything(tmp_path: Path) -> None:
    first = profile_of(HostDevice(), [Q8_0], folder=tmp_path, how=SMALL)
    (file,) = tmp_path.iterdir()
    note_observed(file, "decode", Observed(1.25, 1000))
    note_observed(file, "prompt", Observed(0.75, 16))
    seen: dict[Phase, Observed] = {"decode": Observed(1.25, 1000), "prompt": Observed(0.75, 16)}
    assert read_profile(file) == replace(first, observed=seen)
    again = profile_of(HostDevice(), [Q4_0], folder=tmp_path, how=SMALL)
    assert again.observed == seen
    assert profile_of(HostDevice(), [Q4_0], anew=True, folder=tmp_path, how=SMALL).observed == {}
    note_observed(tmp_path / "none.json", "decode", Observed(1.0, 1))
    assert not (tmp_path / "none.json").exists()
