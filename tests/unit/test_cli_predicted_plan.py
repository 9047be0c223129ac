"""`luce plan`: predictions for devices with invented figures, and the command line."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from luce.backend import measured_devices, prediction_facts
from luce.backend.fastest_placement import Goal
from luce.backend.measured_devices import MeasuredDevices, ModelOnDevices
from luce.backend.serving_options import ServingOptions
from luce.cli import predicted_plan
from luce.cli.main import main
from luce.cli.predicted_plan import Asked, predicted, show
from luce.config.resolve import resolve
from luce.draft.observed_drafts import observed_path
from luce.draft.open import plan_drafter
from luce.errors import OutOfMemoryError, UsageError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import Attention
from luce.planner.known_cards import card_figures
from luce.profiles import profile_cache
from luce.profiles.draft_cache import DRAFTS, ObservedDrafts
from luce.profiles.profile import DeviceProfile, FormatProfile, LinkProfile
from luce.profiles.timer import ProfileSizes
from luce.runtime.device import Device, DeviceName, Memory
from luce.runtime.host import HostDevice
from luce.shard.sizes import state_bytes
from tests.support.reference import Reference

MODEL = Reference("qwen35-a-F32").path
ASKED = Asked(Goal("balanced", 128, 64))
#: bytes of a device that holds a part of the model
SMALL = 7_000_000
RATES = "decode_tok_s", "prompt_tok_s"


class Gpu(HostDevice):
    """A device with memory of its own, whose figures are invented."""

    def __init__(self, index: int, speed: float, free: int = 1 << 30) -> None:
        super().__init__()
        self.name, self.host, self.speed, self.free = DeviceName("cuda", index), False, speed, free

    def memory(self) -> Memory:
        return Memory(self.free, self.free)


def profile(device: Any) -> DeviceProfile:
    speed = getattr(device, "speed", 1.0)
    figures = FormatProfile(1e9 * speed, {1: 1e9 * speed, 512: 1e10 * speed}, None, 0.1, False)
    return DeviceProfile(str(device.name), "x", 0.0, 1e-5, 1e-6, LinkProfile(1e-6, 1e9), {"F32": figures})


@pytest.fixture(autouse=True)
def invented(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: ModelOnDevices, **how: Any) -> MeasuredDevices:
        return MeasuredDevices({str(device.name): profile(device) for device in model.devices})

    monkeypatch.setattr(predicted_plan, "measured", measured)


def facts(*devices: Device, asked: Asked = ASKED, **options: Any) -> dict[str, Any]:
    with open_gguf(MODEL) as file:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        options = {"context": 256, "chunk": 64} | options
        return predicted(ModelOnDevices(file, spec, devices, ServingOptions(**options)), asked)


def test_a_slow_device_is_left_out_that_luce_serve_would_use() -> None:
    found = facts(Gpu(0, 1.0), Gpu(1, 0.01))
    assert [stage["device"] for stage in found["placement"]["stages"]] == ["cuda:0", "cuda:1"]
    assert [(stage["device"], stage["layers"]) for stage in found["stages"]] == [("cuda:0", [0, 7])]
    (left,) = found["left_out"]
    assert left["device"] == "cuda:1"
    assert left["worse_by"] > 1
    assert found["split"] == "8"
    assert found["decode_tok_s"] > found["placement"]["decode_tok_s"]


def test_without_a_device_is_the_plan_of_the_others() -> None:
    both, alone = facts(Gpu(0, 1.0), Gpu(1, 0.5)), facts(Gpu(1, 0.5))
    (without,) = both["without"]
    assert without["device"] == "cuda:0"
    assert without["decode_tok_s"] == pytest.approx(alone["decode_tok_s"])
    assert without["prompt_tok_s"] == pytest.approx(alone["prompt_tok_s"])
    (without,) = alone["without"]
    assert (without["decode_tok_s"], without["lacks"]) == (None, None)


def test_what_is_missing_without_a_device_is_what_makes_it_fit() -> None:
    found = facts(Gpu(0, 1.0, SMALL), Gpu(1, 0.5, SMALL), context=2048)
    lacks = [without["lacks"] for without in found["without"]]
    assert [without["decode_tok_s"] for without in found["without"]] == [None, None]
    assert facts(Gpu(0, 1.0, SMALL + lacks[1]), context=2048)["stages"]
    with pytest.raises(OutOfMemoryError, match=f"with {lacks[1] >> 20} MiB more on cuda:0"):
        facts(Gpu(0, 1.0, SMALL), context=2048)


@pytest.mark.parametrize("seed", range(4))
def test_each_line_of_the_table_is_the_plan_without_that_device(seed: int) -> None:
    speeds = random.Random(seed).choices((0.3, 0.5, 0.8, 1.0), k=3)
    cards = [Gpu(index, speed, SMALL) for index, speed in enumerate(speeds)]
    found = facts(*cards, context=2048)
    for less in found["without"]:
        others = [card for card in cards if str(card.name) != less["device"]]
        try:
            alone = facts(*others, context=2048)
        except OutOfMemoryError:
            assert less["decode_tok_s"] is None
        else:
            assert [less[rate] for rate in RATES] == pytest.approx([alone[rate] for rate in RATES])
    for more in found["with"]:
        (like,) = (card for card in cards if str(card.name) == more["device"])
        both = facts(*cards, Gpu(3, like.speed, SMALL), context=2048)
        assert [more[rate] for rate in RATES] == pytest.approx([both[rate] for rate in RATES])


def test_one_more_device_is_one_with_the_same_figures() -> None:
    asked = Asked(Goal("prompt", 256, 1))
    both, alone = facts(Gpu(0, 1.0), Gpu(1, 1.0), asked=asked), facts(Gpu(0, 1.0), asked=asked)
    assert alone["with"][0]["prompt_tok_s"] == pytest.approx(both["prompt_tok_s"])


def test_shares_are_predicted_beside_the_fastest_placement() -> None:
    found = facts(Gpu(0, 1.0), Gpu(1, 1.0), layer_split=(1.0, 3.0))
    assert [stage["layers"] for stage in found["placement"]["stages"]] == [[0, 1], [2, 7]]


def test_the_split_makes_the_placement() -> None:
    size = facts(Gpu(0, 1.0))["stages"][0]["bytes"]
    small = facts(Gpu(0, 1.0, free=int(size * 0.8)), Gpu(1, 0.5, free=int(size * 0.9)))
    shares = tuple(float(share) for share in small["split"].split(","))
    again = facts(Gpu(0, 1.0), Gpu(1, 1.0), layer_split=shares)
    layers = [stage["layers"] for stage in small["stages"]]
    assert len(layers) == 2
    assert [stage["layers"] for stage in again["placement"]["stages"]] == layers


def test_nothing_fits_is_an_error_with_what_would_help() -> None:
    size = facts(Gpu(0, 1.0))["stages"][0]["bytes"]
    room = int(size / 0.94) + (1 << 20)
    assert facts(Gpu(0, 1.0, free=room))["stages"]
    with pytest.raises(
        OutOfMemoryError, match=r"1000 on cuda:0 are free; with \d+ MiB more on cuda:0 one .*not even one"
    ):
        facts(Gpu(0, 1.0, free=1000))
    with pytest.raises(OutOfMemoryError, match="would fit") as caught:
        facts(Gpu(0, 1.0, free=room), context=4096, asked=Asked(Goal("balanced", 64, 64)))
    (context,) = re.findall(r"--max-ctx (\d+)", str(caught.value))
    assert 256 <= int(context) < 4096
    assert facts(Gpu(0, 1.0, free=room), context=int(context), asked=Asked(Goal("balanced", 64, 64)))["stages"]
    with pytest.raises(OutOfMemoryError):
        facts(Gpu(0, 1.0, free=room), context=int(context) + 64, asked=Asked(Goal("balanced", 64, 64)))


def test_a_device_that_is_not_there_is_planned_like_one_that_is() -> None:
    size = facts(Gpu(0, 1.0))["stages"][0]["bytes"]
    small = Gpu(0, 1.0, free=int(size * 0.8))
    there = facts(small, Gpu(1, 1.0))
    found = facts(small, asked=Asked(ASKED.goal, what_if=("cuda:0@1GiB",)))
    assert [stage["device"] for stage in there["stages"]] == ["cuda:1"]
    assert [stage["device"] for stage in found["stages"]] == ["cuda:0+1"]
    assert found["prompt_tok_s"] == pytest.approx(there["prompt_tok_s"])
    assert (found["what_if"], found["data_sheets"], found["split"]) == (["cuda:0@1GiB"], [], None)
    # Behind a slow link it costs more than it brings.
    far = facts(Gpu(0, 1.0), asked=Asked(ASKED.goal, what_if=("cuda:0@1GiB,1.5,1e9",)))
    assert [device["device"] for device in far["left_out"]] == ["cuda:0+1"]
    assert far["left_out"][0]["worse_by"] > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h999@1GiB", "expected DEVICE@FREE with one of cuda:0"),
        ("cuda:0", "expected DEVICE@FREE"),
        ("cuda:0@much", "expected DEVICE@FREE"),
        ("cuda:0@1GiB,-1,5", "expected DEVICE@FREE"),
        ("cuda:0@1GiB,1", "expected DEVICE@FREE"),
        ("cuda:0@1GiB,1,0", "expected DEVICE@FREE"),
    ],
)
def test_a_device_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"--what-if {text}: {message}"):
        facts(Gpu(0, 1.0), asked=Asked(ASKED.goal, what_if=(text,)))


def test_a_card_that_is_not_there_is_planned_with_its_data_sheet() -> None:
    found = facts(Gpu(0, 1.0, free=1000), asked=Asked(ASKED.goal, what_if=("3090@1GiB",)))
    assert [stage["device"] for stage in found["stages"]] == ["3090+1"]
    # A layer's weights are read at 60 % of 936 GB/s, as the file has them.
    figures = card_figures("3090", 1 << 30, bytes_per_weight=0.5, expand=1.0)
    assert figures.read == pytest.approx(0.6 * 936e9)
    assert figures.rates == (
        (1, pytest.approx(4 * 0.6 * 936e9)),
        (16, 0.06 * 71e12),
        (512, 0.45 * 71e12),
        (2048, 0.6 * 71e12),
    )
    # Where arithmetic is no limit, more rows are not slower than one.
    assert min(
        rate for _, rate in card_figures("strix-halo", 1, bytes_per_weight=0.05, expand=1.0).rates
    ) == pytest.approx(40 * 0.6 * 256e9)
    with pytest.raises(UsageError, match="one of cuda:0, 3090, 4060ti"):
        facts(Gpu(0, 1.0), asked=Asked(ASKED.goal, what_if=("3091@1GiB",)))


def test_plans_with_cards_alone_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted_plan, "measured", None)
    found = facts(Gpu(0, 1.0), asked=Asked(ASKED.goal, what_if=("h100@1GiB", "3090@1GiB"), alone=True))
    assert [stage["device"] for stage in found["stages"]] == ["h100+1"]
    assert [device["device"] for device in found["left_out"]] == ["3090+2"]
    assert (found["placement"], found["profiles"]) == (None, {})
    assert found["data_sheets"] == ["h100@1GiB", "3090@1GiB"]
    with pytest.raises(UsageError, match="--what-if-only: requires --what-if"):
        facts(Gpu(0, 1.0), asked=Asked(ASKED.goal, alone=True))


def test_cards_alone_keep_keys_and_values_as_cards_do() -> None:
    """Whatever the devices of this machine."""
    asked = Asked(ASKED.goal, what_if=("3090@1GiB",), alone=True)
    found = [facts(device, asked=asked, context=4096)["stages"][0] for device in (HostDevice(), Gpu(0, 1.0))]
    with open_gguf(MODEL) as file:
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        attention = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
        slots = state_bytes(HostDevice(), spec, range(8), ServingOptions()).slot
    kept = sum(2 * 2 * mixer.kv_heads * mixer.head_dim * 4096 for mixer in attention)
    assert found[0]["state"] == found[1]["state"] == kept + slots


def test_prompts_in_int8_are_predicted_in_it_where_a_device_has_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: ModelOnDevices, **how: Any) -> MeasuredDevices:
        found = {str(device.name): profile(device) for device in model.devices}
        first = found["cuda:0"].formats["F32"]
        found["cuda:0"] = replace(found["cuda:0"], formats={"F32": replace(first, int8={512: 1e11})})
        return MeasuredDevices(found, int8=model.int8)

    monkeypatch.setattr(predicted_plan, "measured", measured)
    devices = Gpu(0, 1.0, SMALL), Gpu(1, 1.0, SMALL)
    plain, int8 = (facts(*devices, prompt_precision=precision) for precision in ("fp16", "int8"))
    before, after = (found["placement"]["stages"][0]["piece_s"] for found in (plain, int8))
    assert before > 2 * after
    assert [found["profiles"]["cuda:0"]["prompts"] for found in (plain, int8)] == ["fp16", "int8"]
    assert [int8["profiles"][name]["without_int8"] for name in ("cuda:0", "cuda:1")] == [False, True]
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    show(console, int8)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("prompts predicted in fp16 as it has no figures of int8") == 1
    assert re.search("cuda:1 measured .*, prompts predicted in fp16", text)


def test_goals_are_compared() -> None:
    devices = Gpu(0, 1.0), Gpu(1, 0.9)
    found = facts(*devices, asked=Asked(ASKED.goal, compare=True), layer_split=(1.0, 3.0))["compare"]
    assert list(found) == ["memory", "shares", "decode", "prompt", "balanced"]
    assert [stage["layers"] for stage in found["shares"]["stages"]] == [[0, 1], [2, 7]]
    assert [stage["device"] for stage in found["memory"]["stages"]] == ["cuda:0", "cuda:1"]
    for goal in ("decode", "prompt", "balanced"):
        alone = facts(*devices, asked=Asked(Goal(goal, 128, 64)))  # type: ignore[arg-type]
        assert found[goal] == {name: alone[name] for name in found[goal]}
    assert found["decode"]["decode_tok_s"] >= found["memory"]["decode_tok_s"]


def test_the_terms_of_a_layer_add_up_to_the_stage() -> None:
    found = [facts(Gpu(0, 1.0), asked=Asked(ASKED.goal, layer=layer)) for layer in range(8)]
    decode = sum(sum(layer["layer"]["cuda:0"]["decode"].values()) for layer in found)
    # Beside its layers, the stage has the head and 1e-5 s of the step.
    assert 1e-5 < found[0]["stages"][0]["decode_s"] - decode < 1e-3
    with pytest.raises(UsageError, match="--explain-layer 8: the last layer is 7"):
        facts(Gpu(0, 1.0), asked=Asked(ASKED.goal, layer=8))


#: what is planned, and the file with its text
GOLDEN: dict[str, tuple[list[Device], Asked, dict[str, Any]]] = {
    "one-of-two": ([Gpu(0, 1.0), Gpu(1, 0.01)], ASKED, {}),
    "two": (
        [Gpu(0, 1.0, SMALL), Gpu(1, 0.5, SMALL)],
        Asked(Goal("prompt", 2048, 64), compare=True, layer=3),
        {"context": 2048},
    ),
    "a-card-that-is-not-there": (
        [Gpu(0, 1.0, SMALL)],
        replace(ASKED, what_if=("3090@1GiB,0.0005,1e8",)),
        {"context": 8192},
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_text_of_a_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_facts.time, "time", lambda: 3.5 * 86400)
    devices, asked, options = GOLDEN[name]
    console = Console(width=130, file=io.StringIO(), force_terminal=False)
    show(console, facts(*devices, asked=asked, **options))
    assert isinstance(console.file, io.StringIO)
    text = "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())
    assert text == (Path(__file__).parents[1] / "reference" / "predicted_plans" / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "cuda:0 measured 3 days ago"),
        ({"age_s": 86399.0}, "cuda:0 measured today"),
        ({"noisy": ["Q4_K"]}, "cuda:0 measured 3 days ago (noisy)"),
        ({"observed": 1.25}, "cuda:0 measured 3 days ago, times 1.25 for decoding as observed"),
        (
            {"observed": 1.25, "observed_prompts": 0.5},
            "cuda:0 measured 3 days ago, times 1.25 for decoding and 0.50 for prompts as observed",
        ),
        (
            {"way": {"latency_s": 0.3, "bytes_per_second": 5e5, "slow": True}},
            "cuda:0 measured 3 days ago (300 ms, 0.5 MB/s to it, a slow link)",
        ),
    ],
)
def test_the_first_line_says_what_figures_rest_on(
    change: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_facts.time, "time", lambda: 3.5 * 86400)
    found = facts(Gpu(0, 1.0))
    found["profiles"]["cuda:0"] |= change
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    show(console, found)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[0].endswith(f"; figures: {text}")


def test_figures_that_varied_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: ModelOnDevices, **how: Any) -> MeasuredDevices:
        own = profile(model.devices[0])
        noisy = {name: replace(figures, noisy=True) for name, figures in own.formats.items()}
        return MeasuredDevices({"cuda:0": replace(own, formats=noisy)})

    monkeypatch.setattr(predicted_plan, "measured", measured)
    assert facts(Gpu(0, 1.0))["profiles"]["cuda:0"]["noisy"] == ["F32"]


def command(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    status = main(["plan", str(MODEL), "--max-ctx", "256", *flags])
    return status, *capsys.readouterr()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Devices of this machine, measured with little work."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(predicted_plan, "measured", measured_devices.measured)
    monkeypatch.setattr(
        profile_cache,
        "HOST_PROFILE",
        ProfileSizes(1 << 16, 256, 32, (1, 32), 4, 1 << 12, 0.0, 64, 32, recurrent_layers=1),
    )
    return tmp_path / "profiles"


def test_the_command_prints_both_placements(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--devices", "cpu:0,cpu:1", "--optimize-prompt", "128", "--measure-budget", "600"
    status, out, _ = command(capsys, *flags)
    assert status == 0
    command(capsys, *flags, "--compare", "--explain-layer", "3")
    for expected in (
        "the placement by free memory",
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
    assert {profile["key"] for profile in found["profiles"].values()} == {file.stem}
    assert (status, found["load"]) == (0, {"sequences": 1, "context": 256, "prompt": 128, "reply": 256})
    assert file.read_text() == before
    status, out, _ = command(capsys, *flags, "--measure", "--json", "--optimize", "decode")
    assert json.loads(out)["optimize"] == "decode"
    assert file.read_text() != before


def test_a_draft_is_in_the_plan(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--devices", "cpu:0", "--optimize-prompt", "128", "--measure-budget", "600"
    _, out, _ = command(capsys, *flags, "--json")
    plain = json.loads(out)
    assert plain["draft"] is None
    drafted = *flags, "--draft", str(MODEL)
    status, out, _ = command(capsys, *drafted, "--json")
    found = json.loads(out)
    assert status == 0
    draft, stages = found["draft"], found["stages"]
    assert (draft["device"], draft["rows"], draft["tokens_per_step"], draft["measured"]) == ("cpu:0", 9, 1, False)
    # Eight passes of one row, each a step of the whole model.
    assert draft["decode_s"] == pytest.approx(8 * plain["stages"][0]["decode_s"], rel=1e-6)
    way = 1 / plain["decode_tok_s"] - plain["stages"][0]["decode_s"]
    step = sum(stage["decode_s"] for stage in stages) + draft["decode_s"] + way
    assert found["decode_tok_s"] == pytest.approx(1 / step)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_gguf(MODEL))
        config = resolve({"draft": str(MODEL)}, env={})
        spec = read_spec(Source(str(file.paths[0]), file.metadata, file.tensors))
        plan = plan_drafter(stack, config, file, spec, [HostDevice()], context=256)
        assert plan is not None
        DRAFTS.write(observed_path(config, file, plan.spec), ObservedDrafts(9.0, 2.5, 1000))
    _, out, _ = command(capsys, *drafted, "--json")
    known = json.loads(out)
    assert known["decode_tok_s"] == pytest.approx(2.5 / step)
    _, out, _ = command(capsys, *drafted)
    line = next(line for line in out.splitlines() if line.startswith("draft"))
    expected = r"draft on cpu:0: 0\.\d\d GiB, [\d.]+ ms a step; verifies 9 rows, 2\.50 tokens a step, as measured"
    assert re.fullmatch(expected, line)


def test_the_line_of_a_draft_says_what_it_rests_on() -> None:
    facts = {"device": "hip:0", "bytes": 3 << 29, "rows": 7, "tokens_per_step": 1.0, "measured": False}
    assert predicted_plan.draft_text({**facts, "decode_s": None}) == (
        "draft on hip:0: 1.50 GiB, its time is not counted; verifies 7 rows, counted as 1 token a step until a server "
        "has measured it"
    )
    assert predicted_plan.draft_text({**facts, "device": None, "measured": True, "tokens_per_step": 3.2}) == (
        "draft; verifies 7 rows, 3.20 tokens a step, as measured"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimize-prompt", "0"], "--optimize-prompt: expected an integer"),
        (["--optimize", "speed"], "--optimize"),
        (["--explain-layer", "first"], "--explain-layer first: expected an integer"),
        (["--what-if", "x"], "--what-if x: expected DEVICE@FREE with one of cpu:0"),
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
    status, _, err = command(capsys)
    assert status == 2
    assert "--kvflash: luce plan" in err
