"""`luce plan`: predictions for devices with invented figures, and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from luce.backend.serving_options import ServingOptions
from luce.cli import predicted_plan
from luce.cli.main import main
from luce.cli.predicted_plan import Asked, predicted
from luce.errors import OutOfMemoryError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.profiles import profile_cache
from luce.profiles.measuring import ProfileSizes
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.runtime.device import Device, DeviceName, Memory
from luce.runtime.host import HostDevice
from tests.support.reference import Reference

MODEL = Reference("qwen35-a-F32").path
ASKED = Asked("balanced", 128, 64, anew=False)


class Gpu(HostDevice):
    """A device with memory of its own, whose figures are invented."""

    def __init__(self, index: int, speed: float, free: int = 1 << 30) -> None:
        super().__init__()
        self.name, self.host, self.speed, self.free = DeviceName("cuda", index), False, speed, free

    def memory(self) -> Memory:
        return Memory(self.free, self.free)


@pytest.fixture(autouse=True)
def invented(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(device: Any, types: Any, *, anew: bool) -> DeviceProfile:
        figures = FormatProfile(1e9 * device.speed, {1: 1e9 * device.speed, 512: 1e10 * device.speed}, None, 0.1, False)
        return DeviceProfile(
            str(device.name), "x", 0.0, 1e-5, 1e-6, LinkProfile(1e-6, 1e9), {type.name: figures for type in types}
        )

    monkeypatch.setattr(predicted_plan, "profile_of", profile)


def facts(*devices: Device, asked: Asked = ASKED, **options: Any) -> dict[str, Any]:
    with open_gguf(MODEL) as file:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        return predicted(file, spec, devices, ServingOptions(context=256, chunk=64, **options), asked)


def test_a_slow_device_is_left_out_that_luce_serve_would_use() -> None:
    found = facts(Gpu(0, 1.0), Gpu(1, 0.01))
    assert [stage["device"] for stage in found["placement"]["stages"]] == ["cuda:0", "cuda:1"]
    assert [(stage["device"], stage["layers"]) for stage in found["fastest"]["stages"]] == [("cuda:0", [0, 7])]
    assert found["left_out"] == ["cuda:1"]
    assert found["split"] == "8"
    assert found["fastest"]["decode_tok_s"] > found["placement"]["decode_tok_s"]


def test_without_a_device_is_the_plan_of_the_others() -> None:
    both, alone = facts(Gpu(0, 1.0), Gpu(1, 0.5)), facts(Gpu(1, 0.5))
    (without,) = both["without"]
    assert without["device"] == "cuda:0"
    assert without["decode_tok_s"] == pytest.approx(alone["fastest"]["decode_tok_s"])
    assert without["prompt_tok_s"] == pytest.approx(alone["fastest"]["prompt_tok_s"])
    (without,) = alone["without"]
    assert without["decode_tok_s"] is None


def test_one_more_device_is_one_with_the_same_figures() -> None:
    asked = Asked("prompt", 256, 1, anew=False)
    both, alone = facts(Gpu(0, 1.0), Gpu(1, 1.0), asked=asked), facts(Gpu(0, 1.0), asked=asked)
    assert alone["with"][0]["prompt_tok_s"] == pytest.approx(both["fastest"]["prompt_tok_s"])


def test_shares_are_predicted_beside_the_fastest_placement() -> None:
    found = facts(Gpu(0, 1.0), Gpu(1, 1.0), layer_split=(1.0, 3.0))
    assert [stage["layers"] for stage in found["placement"]["stages"]] == [[0, 1], [2, 7]]


def test_the_split_makes_the_placement() -> None:
    size = facts(Gpu(0, 1.0))["fastest"]["stages"][0]["bytes"]
    small = facts(Gpu(0, 1.0, free=int(size * 0.8)), Gpu(1, 0.5, free=int(size * 0.9)))
    shares = tuple(float(share) for share in small["split"].split(","))
    again = facts(Gpu(0, 1.0), Gpu(1, 1.0), layer_split=shares)
    layers = [stage["layers"] for stage in small["fastest"]["stages"]]
    assert len(layers) == 2
    assert [stage["layers"] for stage in again["placement"]["stages"]] == layers


def test_nothing_fits_is_an_error_with_the_bytes() -> None:
    with pytest.raises(OutOfMemoryError, match=r"no placement fits: the weights take \d+ bytes .* 1000 on cuda:0"):
        facts(Gpu(0, 1.0, free=1000))


def command(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    status = main(["plan", str(MODEL), "--max-ctx", "256", *flags])
    return status, *capsys.readouterr()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Devices of this machine, measured with little work."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(predicted_plan, "profile_of", profile_cache.profile_of)
    monkeypatch.setattr(profile_cache, "HOST_PROFILE", ProfileSizes(1 << 16, 256, 32, (1, 32), 4, 1 << 12, 0.0, 64))
    return tmp_path / "profiles"


def test_the_command_prints_both_placements(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--devices", "cpu:0,cpu:1", "--prompt", "128"
    status, out, _ = command(capsys, *flags)
    assert status == 0
    for expected in (
        "the placement of luce serve",
        "0..",
        "cpu:1",
        "tok/s",
        "limited by",
        "without it",
        "measured today",
    ):
        assert expected in out
    (file,) = measured.iterdir()
    before = file.read_text()
    status, out, _ = command(capsys, *flags, "--json")
    found = json.loads(out)
    assert (status, found["load"]) == (0, {"sequences": 1, "context": 256, "prompt": 128, "reply": 256})
    assert file.read_text() == before
    status, out, _ = command(capsys, *flags, "--measure", "--json", "--optimize", "decode")
    assert json.loads(out)["optimize"] == "decode"
    assert file.read_text() != before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "257"], "--prompt 257: --max-ctx is 256"),
        (["--prompt", "0"], "--prompt: expected an integer"),
        (["--reply", "many"], "--reply: expected an integer"),
        (["--optimize", "memory"], "--optimize"),
    ],
)
def test_refused_flags(measured: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = command(capsys, "--devices", "cpu:0", *flags)
    assert status == 2
    assert message in err


def test_kvflash_of_the_environment_is_refused(
    measured: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUCE_KVFLASH", "512")
    status, _, err = command(capsys, "--prompt", "128")
    assert status == 2
    assert "--kvflash: luce plan" in err
