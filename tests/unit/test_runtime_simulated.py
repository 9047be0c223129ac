"""Simulated devices: queues, copies and memory by a clock of the test, and how the settings name them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from luce.cli.main import main
from luce.config.resolve import resolve
from luce.errors import DeviceError, OutOfMemoryError, UsageError
from luce.runtime.host import HostDevice, HostEvent
from luce.runtime.open import named, open_devices, total_memory
from luce.runtime.simulated import SYSTEM_CLOCK, SimulatedDevice, SimulatedEvent
from tests.support.reference import Reference
from tests.support.simulated import LINK, WAY, VirtualClock, card, machine, write

MODEL = str(Reference("qwen3-a-F32").path)


def pair(*, linked: bool, computes: bool = False) -> tuple[SimulatedDevice, SimulatedDevice]:
    both, clock = machine(card(), card(), linked=linked), VirtualClock()
    first, second = (SimulatedDevice(both, i, HostDevice() if computes else None, clock) for i in (0, 1))
    return first, second


def test_queued_work_follows_work_and_waits_for_events() -> None:
    first, second = pair(linked=True)
    first.queue.take(2.0)
    begun = first.record(timing=True)
    first.queue.take(3.0)
    ended = first.record(timing=True)
    second.queue.take(1.0)
    second.wait_for(ended)
    second.queue.take(1.0)
    assert ended.seconds_since(begun) == 3.0
    assert not begun.done() and first.clock.now() == 0.0
    second.synchronize()
    assert first.clock.now() == 6.0 and begun.done() and ended.done()
    # An idle device begins now, not when it became idle.
    first.queue.take(1.0)
    first.synchronize()
    assert first.clock.now() == 7.0
    first.wait_for(HostEvent())


def test_copies_take_the_time_of_their_way() -> None:
    for linked, way in ((True, LINK), (False, WAY)):
        first, second = pair(linked=linked)
        assert first.reaches(second) == linked and not first.reaches(HostDevice())
        source, target = first.empty(1000), second.zeros((2, 1000))[1]
        copies = first.copy_stream()
        copies.copy(target, source)
        copies.copy(target, source)
        done = copies.record()
        assert isinstance(done, SimulatedEvent)
        # One behind another has no latency of its own; one behind a wait has.
        assert done.at == pytest.approx(way.latency + 2 * 4000 / way.bandwidth)
        copies.copy(first.pinned(4000).view(np.float32), source)
        more = copies.record()
        assert isinstance(more, SimulatedEvent)
        assert more.at - done.at == pytest.approx(WAY.latency + 4000 / WAY.bandwidth)


def test_only_devices_that_compute_write() -> None:
    for computes in (False, True):
        first, second = pair(linked=True, computes=computes)
        source, target = first.upload(np.ones(4, np.float32)), second.zeros(4)
        first.copy_stream().copy(target, source)
        assert second.download(target).tolist() == ([1.0] * 4 if computes else [0.0] * 4)
        assert (first.packed, first.kv_dtype) == ((False, np.float32) if computes else (True, np.float16))
        with pytest.raises(DeviceError, match=r"sim:0 runs no kernels \(asked for fill of"):
            first.launch("fill", "fill", (1,), (1,), ())
        with pytest.raises(DeviceError, match="multiplies nothing"):
            first.gemm(source, source, target)


def test_memory_is_held_once_and_given_back_once() -> None:
    device = SimulatedDevice(machine(card(1000)), 0)
    give_back = device.hold(600)
    assert (device.memory().free, device.memory().total) == (400, 1000)
    with pytest.raises(OutOfMemoryError, match="sim:0: 401 bytes asked, 400 bytes free"):
        device.hold(401)
    give_back()
    give_back()
    assert device.memory().free == 1000


@pytest.mark.parametrize("seconds", [0.0, 2e-4, 5e-3])
def test_real_time_is_waited_for(seconds: float) -> None:
    at = SYSTEM_CLOCK.now() + seconds
    SYSTEM_CLOCK.wait_until(at)
    assert SYSTEM_CLOCK.now() >= at
    SYSTEM_CLOCK.wait_until(at)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = write(tmp_path / "sim.json", card(1 << 30), card(1 << 31, computes=True), linked=True)
    monkeypatch.setenv("LUCE_SIM_DEVICES", str(path))
    return path


def test_settings_name_them(file: Path) -> None:
    devices = open_devices(resolve({"target_devices": "sim:1,sim:0,cpu:0", "cpu_weights": "float32"}))
    assert [str(device.name) for device in devices] == ["sim:1", "sim:0", "cpu:0"]
    first, second, _ = devices
    assert isinstance(first, SimulatedDevice) and isinstance(first.cpu, HostDevice) and first.computes
    assert isinstance(second, SimulatedDevice) and second.cpu is None and not second.computes
    for device in devices:
        device.close()
    assert total_memory(resolve({"target_devices": "sim:0,sim:1"})) == (3 << 30, ["sim:0", "sim:1"])
    # `auto` never means them.
    assert not any(name.simulated for name in named(["auto"]))
    with pytest.raises(UsageError, match="--target-devices sim:2: the file of LUCE_SIM_DEVICES has 2 devices"):
        open_devices(resolve({"target_devices": "sim:0,sim:2"}))
    with pytest.raises(UsageError, match="target_devices"):
        resolve({"target_devices": "tcp://host:1/sim:0"}, spell=str)


def test_a_plan_and_a_reply(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MODEL, "--devices", "sim:0,sim:1", "--optimize", "decode", "--pin-devices", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [stage["device"] for stage in facts["stages"]] == ["sim:0", "sim:1"]
    (link,) = facts["links"]
    assert link["decode_s"] == pytest.approx(LINK.latency + link["bytes_per_token"] / LINK.bandwidth)
    assert main(["plan", MODEL, "--devices", "sim:0,sim:1"]) == 0
    assert "figures: sim:0 simulated, sim:1 simulated" in " ".join(capsys.readouterr().out.split())
    assert main(["serve", MODEL, "--devices", "sim:0,sim:1", "--dry-run"]) == 0
    assert "sim:1" in capsys.readouterr().out
    assert main(["bench", MODEL, "--devices", "sim:0", "-p", "16", "-n", "2", "-r", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [device["limits"] for device in report["devices"]] == [None]


def test_a_bad_file_is_a_usage_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('{"devices": [{"name": 3}]}')
    assert main(["plan", MODEL, "--devices", "sim:0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"luce: LUCE_SIM_DEVICES: {file}: devices[0].name: Expected `str`, got `int`"
    )


def test_without_the_variable_nothing_of_it_is_imported() -> None:
    code = (
        "import sys; from luce.cli.main import main; "
        f"status = main(['plan', {MODEL!r}, '--devices', 'sim:0,cpu:0']); "
        "print([name for name in sys.modules if 'simulated' in name]); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "[]\n"
    assert done.stderr.endswith("luce: --target-devices sim:0: the file of LUCE_SIM_DEVICES has 0 devices\n")
