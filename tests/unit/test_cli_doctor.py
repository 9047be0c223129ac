"""`luce doctor` on machines that lack something."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from luce.bench.limits import Limits
from luce.cli import doctor
from luce.cpu_kernels.lowering import INSTRUCTIONS
from luce.errors import UsageError
from luce.profiles import profile_cache
from luce.profiles.timer import ExpertSizes, ProfileSizes
from luce.runtime import driver
from luce.runtime.cores import thread_count
from tests.support.fake_cuda import fake_driver

#: of reads, of products on packed weights and of float32 products
RATES = (21e9, 3e11, 7e10)


@pytest.fixture(autouse=True)
def invented_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure takes seconds, and half a GiB."""
    monkeypatch.setattr(doctor, "host_limits", lambda sizes, rows: Limits(40e9, RATES[0], {rows[0]: RATES[2]}))
    monkeypatch.setattr(doctor, "packed_rate", lambda device, rows, side: RATES[1])


def run(
    capsys: pytest.CaptureFixture[str], *, as_json: bool, measure: bool = False, seconds: str | None = None
) -> tuple[int, str]:
    status = doctor.run(argparse.Namespace(json=as_json, measure=measure, measure_budget=seconds))
    return status, capsys.readouterr().out


@pytest.fixture
def broken_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two GPUs that the driver names, but no CuPy."""
    fake = fake_driver(tmp_path)
    monkeypatch.setattr(driver, "load", {"cuda": fake, "hip": None}.get)
    monkeypatch.setitem(sys.modules, "cupy", None)


def test_the_cpu_always_serves(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load", lambda vendor: None)
    status, out = run(capsys, as_json=True)
    report = json.loads(out)
    assert status == 0
    (cpu,) = report["devices"]
    assert (cpu["device"], cpu["works"], cpu["problems"]) == ("cpu:0", True, [])
    assert cpu["threads"] == thread_count() and cpu["arch"] == INSTRUCTIONS
    assert (cpu["read_bytes_per_second"], cpu["packed_flops_per_second"], cpu["float_flops_per_second"]) == RATES
    assert report["libraries"]["cuda"]["driver"] is None
    assert report["blas"], "NumPy has a BLAS"


@pytest.mark.usefixtures("broken_gpus")
def test_a_gpu_that_does_not_work_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, as_json=True)
    report = json.loads(out)
    devices = {device["device"]: device for device in report["devices"]}
    assert list(devices) == ["cuda:0", "cuda:1", "cpu:0"]
    assert report["cupy"] is None
    for index, (name, arch) in enumerate([("Fake One", "sm_86"), ("Fake Two", "sm_120a")]):
        device = devices[f"cuda:{index}"]
        assert (device["name"], device["arch"], device["works"]) == (name, arch, False)
        assert device["shared_optin"] == 101376
        assert "needs CuPy" in device["problems"][0]
    assert report["libraries"]["cuda"]["driver"]["version"] == "12.8"


@pytest.mark.usefixtures("broken_gpus")
def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, as_json=False)
    assert status == 0
    for text in ("Fake One", "sm_120a", "cuda:1 needs CuPy", "cpu:0", "not installed", "/dev/shm", "RLIMIT_MEMLOCK"):
        assert text in out
    line = f"{thread_count()} threads read 21 GB/s, multiply 0.30 TFLOP/s on packed weights ({INSTRUCTIONS})"
    assert line in " ".join(out.split())


def test_a_working_gpu_in_the_table() -> None:
    gpu = {"device": "hip:0", "name": "Some GPU", "arch": "gfx90a", "lanes": 64, "free": 3 << 30, "total": 4 << 30}
    gpu |= {"shared": 65536, "shared_optin": 65536, "kernels": 12, "kernel_seconds": 1.5, "graphs": False}
    gpu |= {"works": True, "problems": []}
    report = {"luce": "0", "python": "3", "numpy": "2", "cupy": "14", "blas": [], "libraries": {}, "devices": [gpu]}
    text = io.StringIO()
    doctor.show(Console(file=text, width=200), report | {"shm": None, "memlock": None})
    for part in ("hip:0", "gfx90a", "64", "3.0 / 4.0 GiB", "64 KiB, 64 on request", "12 in 1.5 s", "yes", "unlimited"):
        assert part in text.getvalue()
    assert "hip:0 cannot capture CUDA graphs: every step queues each launch" in text.getvalue()


def test_no_working_device_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    working = json.loads(run(capsys, as_json=True)[1])
    broken = working | {"devices": [device | {"works": False} for device in working["devices"]]}
    monkeypatch.setattr(doctor, "examine", lambda examination: broken)
    assert run(capsys, as_json=True)[0] == 4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A CPU alone, measured with little work."""
    monkeypatch.setattr(driver, "load", lambda vendor: None)
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    sizes = ProfileSizes(1 << 16, 256, 32, (1, 32), 4, 1 << 12, 0.0, 64, 32, ExpertSizes(4, 2, 1 << 12, (1,)), 1)
    monkeypatch.setattr(profile_cache, "HOST_PROFILE", sizes)
    return tmp_path / "profiles"


def test_measured_figures_are_shown_and_kept(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    status = doctor.run(argparse.Namespace(json=True, measure=True, measure_budget=None))
    out, err = capsys.readouterr()
    (cpu,) = json.loads(out)["devices"]
    assert status == 0
    assert set(cpu["profile"]["formats"]) == {"Q4_K", "Q6_K", "Q8_0"}
    (file,) = small.iterdir()
    assert json.loads(file.read_text())["profile"] == cpu["profile"]
    for line in ("luce: cpu:0: launches", "luce: cpu:0: Q4_K, 1 row", "luce: cpu:0: Q8_0, experts"):
        assert line in err.splitlines()
    status, out = run(capsys, as_json=False, measure=True)
    assert "GB/s" in out
    assert "Q6_K" in out


def test_a_device_without_a_turn_is_not_measured(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    status, out = run(capsys, as_json=True, measure=True, seconds="0")
    assert (status, json.loads(out)["devices"][0]["profile"]) == (0, None)
    assert not small.exists()
    _, out = run(capsys, as_json=False, measure=True, seconds="0")
    assert "cpu:0: not measured, --measure-budget is over" in out


@pytest.mark.parametrize(
    ("measure", "seconds", "message"),
    [(True, "soon", "--measure-budget soon: expected a number"), (False, "3", "--measure-budget: requires --measure")],
)
def test_a_budget_that_is_refused(
    capsys: pytest.CaptureFixture[str], measure: bool, seconds: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(capsys, as_json=True, measure=measure, seconds=seconds)
