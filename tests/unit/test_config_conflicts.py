"""The placement settings: grammar, refusals, and precedence of origins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.cli.main import main, parse
from luce.config.resolve import resolve
from luce.config.settings import Config
from luce.errors import UsageError

local = st.tuples(st.sampled_from(["cuda", "hip", "cpu"]), st.integers(0, 2**31 - 1)).map("{0[0]}:{0[1]}".format)
far = st.tuples(st.sampled_from(["far", "[::1]"]), st.integers(1, 2**16 - 1), local).map(
    "tcp://{0[0]}:{0[1]}/{0[2]}".format
)
devices = st.one_of(local, far, st.integers(0, 2**31 - 1).map("auto:{}".format))

BAD_DEVICES = (
    *("", "gpu", "cuda:", ":0", "cuda:-1", "cuda:+1", "cuda: 0", " cuda:0", "cuda:0 ", "cuda:01", "CUDA:0", "rocm:0"),
    *("cuda:0:0", "cuda:0x1", "cpu:1.0", "cuda:0\n", "cuda:\u0663", "Auto", "auto:", f"cuda:{2**31}"),
    *("tcp://far/cpu:0", "tcp://far:65536/cpu:0", "tcp://far:0/cpu:0", "tcp://:9/cpu:0", "tcp://far:9/auto:0"),
)
BAD_LISTS = ("cuda:0,", ",cuda:0", "cuda:0,,cuda:1", ",", "cuda:0, cuda:1", "cuda:0;cuda:1")
BAD_WEIGHTS = (
    *("", "1,", ",1", "1,,2", "1 ,2", "1, 2", "a", "1,b", "1_0,1", "0x1,1", "\u0661,1"),
    *("0,1", "-1,2", "1,inf", "nan,1", "1e999,1", "1,0e5", "1,-0.0"),
)


def settings(**given: Any) -> Config:
    return resolve(given, env={})


def refusal(**given: Any) -> str:
    with pytest.raises(UsageError) as caught:
        settings(**given)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message


@given(devices)
def test_devices_survive(text: str) -> None:
    assert settings(target_device=text).target_device == text
    assert settings(target_devices=text).target_devices == (text,)


@given(st.lists(devices, min_size=1, max_size=6, unique=True), st.data())
def test_lists_survive(names: list[str], data: st.DataObject) -> None:
    config = settings(target_devices=",".join(names))
    assert config.target_devices == tuple(names)
    if len(names) > 1:
        size = {"min_size": len(names), "max_size": len(names)}
        weights = data.draw(st.lists(st.floats(1e-300, 1e300), **size))
        config = settings(target_devices=names, target_layer_split=weights)
        assert config.target_layer_split == tuple(weights)


@pytest.mark.parametrize("text", BAD_DEVICES)
def test_bad_device(text: str) -> None:
    assert refusal(target_device=text).startswith("--target-device: expected auto or backend:index ")
    assert refusal(target_devices=f"cpu:0,{text}").startswith("--target-devices: expected backend:index[,backend:index")
    assert repr(text) in refusal(target_device=text)


def test_a_device_without_an_index_is_the_first() -> None:
    assert settings(target_device="cpu").target_device == "cpu:0"
    assert settings(target_devices="cuda,tcp://far:9/hip,cuda:1").target_devices == (
        "cuda:0",
        "tcp://far:9/hip:0",
        "cuda:1",
    )
    assert settings(device_margin="cuda=1GiB").device_margin == (("cuda:0", 1 << 30),)


@pytest.mark.parametrize("text", BAD_LISTS)
def test_bad_list(text: str) -> None:
    message = refusal(target_devices=text)
    assert message.startswith("--target-devices: expected backend:index[,backend:index...]")
    assert message.endswith(f"got {text!r}")
    assert refusal(target_device=text).startswith("--target-device: expected auto or backend:index ")


@pytest.mark.parametrize("text", BAD_WEIGHTS)
def test_bad_weights(text: str) -> None:
    message = refusal(target_devices="cpu:0,cpu:1", target_layer_split=text)
    assert message == f"--target-layer-split: expected positive finite numbers separated by commas, got {text!r}"


@pytest.mark.parametrize(
    ("text", "values"),
    [("1,3", (1, 3)), ("0.08,0.46", (0.08, 0.46)), (".5,5.", (0.5, 5)), ("1e-3,2E+2", (0.001, 200)), ("007,1", (7, 1))],
)
def test_weights(text: str, values: tuple[float, ...]) -> None:
    assert settings(target_devices="cpu:0,cpu:1", target_layer_split=text).target_layer_split == values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"target_device": "cpu:0", "target_devices": "cpu:0,cpu:1"},
            "--target-device cpu:0 and --target-devices cpu:0,cpu:1: give only one of them",
        ),
        ({"target_layer_split": "1,2"}, "--target-layer-split 1,2: requires --target-devices with two or more devices"),
        (
            {"target_device": "cpu:0", "target_layer_split": "1"},
            "--target-layer-split 1: requires --target-devices with two or more devices",
        ),
        (
            {"target_devices": "cpu:0", "target_layer_split": "1"},
            "--target-layer-split 1: requires --target-devices with two or more devices",
        ),
        (
            {"target_devices": "cpu:0,cpu:1", "target_layer_split": ".50"},
            "--target-layer-split 0.5: 1 weights for 2 devices",
        ),
        (
            {"target_devices": "cpu:0,cpu:1", "target_layer_split": "1,2,3"},
            "--target-layer-split 1,2,3: 3 weights for 2 devices",
        ),
        (
            {"target_devices": "cuda:1,cpu:0,cuda:1"},
            "--target-devices cuda:1,cpu:0,cuda:1: cuda:1 is named twice",
        ),
        ({"target_devices": "cpu,cpu:0"}, "--target-devices cpu:0,cpu:0: cpu:0 is named twice"),
        ({"target_devices": "auto,auto"}, "--target-devices auto,auto: auto is named twice"),
        ({"max_ctx": "-1"}, "--max-ctx: expected an integer in 0..2147483647 (4k is 4096), got '-1'"),
    ],
)
def test_combinations(given: dict[str, str], message: str) -> None:
    assert refusal(**given) == message
    assert refusal(**dict(reversed(given.items()))) == message


def test_the_same_number_on_two_backends_is_two_devices() -> None:
    assert settings(target_devices="cuda:0,hip:0,cpu:0").target_devices == ("cuda:0", "hip:0", "cpu:0")


def test_several_errors_are_reported_together() -> None:
    message = refusal(
        target_device="gpu", target_devices="cpu:0,cpu:0", target_layer_split="1,2,3", port="x", cache_type_k="q3"
    )
    assert [re.split("[: ]", part)[0] for part in message.split("; ")] == [
        "--target-device",
        "--port",
        "--cache-type-k",
        "--target-devices",
        "--target-layer-split",
    ]
    assert refusal(target_devices="cpu:0,", target_layer_split="1").count(";") == 0, "a bad list has no length"


@pytest.mark.parametrize(
    "flags",
    [
        ["--target-layer-split", "1,3", "--target-devices", "cpu:0,cpu:1"],
        ["--target-devices", "cpu:0,cpu:1", "--target-layer-split", "1,3"],
        ["--devices", "cpu:0", "--layer-split", "1", "--devices", "cpu:1", "--layer-split", "3"],
    ],
)
def test_the_order_of_flags_does_not_matter(flags: list[str]) -> None:
    arguments = vars(parse(["inspect", "x.gguf", *flags]))
    names = ("target_devices", "target_layer_split")
    config = settings(**{name: arguments[name] for name in names})
    assert (config.target_devices, config.target_layer_split) == (("cpu:0", "cpu:1"), (1.0, 3.0))


@pytest.mark.parametrize("verb", ["serve", "run", "chat", "inspect"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_refusal_at_start(verb: str, order: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [("--target-device", "cpu:0"), ("--target-devices", "cpu:0,cpu:1")][::order]
    assert main([verb, "nowhere.gguf", *(part for pair in flags for part in pair)]) == 2
    printed = capsys.readouterr()
    message = "--target-device cpu:0 and --target-devices cpu:0,cpu:1: give only one of them"
    assert printed == ("", f"luce: {message}\n")


def test_a_stronger_origin_that_names_devices_replaces_the_placement(tmp_path: Path) -> None:
    path = tmp_path / "luce.toml"
    path.write_text('target_devices = ["cuda:0", "cuda:1"]\ntarget_layer_split = [1, 3]\nmax_ctx = 100\n')
    from_file = resolve({"config": path}, env={})
    assert (from_file.target_devices, from_file.target_layer_split) == (("cuda:0", "cuda:1"), (1.0, 3.0))
    flagged = resolve({"config": path, "target_device": "cpu:0"}, env={"LUCE_TARGET_DEVICES": "cpu:1,cpu:2"})
    assert flagged == Config(target_device="cpu:0", max_ctx=100)
    named = resolve({"config": path}, env={"LUCE_TARGET_DEVICES": "cpu:1,cpu:2"})
    assert named == Config(target_devices=("cpu:1", "cpu:2"), max_ctx=100)
    weighed = resolve({"config": path, "target_layer_split": "5,1"}, env={})
    assert weighed == Config(target_devices=("cuda:0", "cuda:1"), target_layer_split=(5.0, 1.0), max_ctx=100)
    both = "LUCE_TARGET_DEVICE cpu:0 and LUCE_TARGET_DEVICES cpu:1,cpu:2: give only one of them"
    with pytest.raises(UsageError, match=f"^{both}$"):
        resolve({}, env={"LUCE_TARGET_DEVICE": "cpu:0", "LUCE_TARGET_DEVICES": "cpu:1,cpu:2"})


TWO = {"target_devices": "cuda:0,cuda:1"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {**TWO, "optimize": "decode", "target_layer_split": "1,2"},
            "--optimize decode: not with --target-layer",
        ),
        (
            {**TWO, "optimize": "memory", "target_layer_split": "1,2"},
            "--optimize memory: not with --target-layer",
        ),
        ({**TWO, "optimize": "decode", "kvflash": "512"}, "--optimize decode: not with --kvflash"),
        ({**TWO, "pin_devices": "true"}, "--pin-devices: requires --optimize"),
        ({"pin_devices": "true", "optimize": "decode"}, "--pin-devices: requires --target-devices"),
    ],
)
def test_goals_that_cannot_be(given: dict[str, str], message: str) -> None:
    assert message in refusal(**given)


def test_a_cluster_adds_devices_to_a_pinned_one() -> None:
    assert settings(target_devices="cpu:0", pin_devices="true", optimize="decode", cluster="home").pin_devices


@pytest.mark.parametrize(
    ("text", "margins"),
    [
        ("2GiB", (("", 2 << 30),)),
        ("cuda:0=1GiB,512", (("cuda:0", 1 << 30), ("", 512 << 20))),
        ("1GiB,2GiB", (("", 2 << 30),)),
    ],
)
def test_margins(text: str, margins: tuple[tuple[str, int], ...]) -> None:
    assert settings(device_margin=text).device_margin == margins


@pytest.mark.parametrize("text", ["", "cuda:0=", "=1GiB", "gpu=1GiB", "1GiB,", "cuda:0=-1"])
def test_refused_margins(text: str) -> None:
    assert "--device-margin" in refusal(device_margin=text)
