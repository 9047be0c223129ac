"""`luce bench` on a tiny model. The limits of the devices are invented: to measure them takes 1 GiB."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from luce.bench.limits import Limits, Sizes, host_limits, packed_rate
from luce.cli import bench
from luce.cli.main import main
from luce.runtime.cpu import CpuDevice
from luce.runtime.device import Device

MODEL = Path(__file__).parents[1] / "reference/qwen35-a-Q8_0.gguf"
SMALL = ["-p", "9,70", "-n", "4", "-d", "0,20", "--rows", "3", "--sequences", "1,3", "-r", "2"]


def invented(device: Device, rows: Sequence[int]) -> Limits:
    """cpu:1 has no BLAS library. A product is the faster, the more rows it has."""
    return Limits(2e9, 1e9, {} if device.name.index else {n: 1e10 * n for n in rows})


@pytest.fixture(autouse=True)
def invented_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "limits", invented)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", str(MODEL), *SMALL, *arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "--target-devices", "cpu:0")
    names = ["prompt 9", "prompt 70", "decode 4", "verify 3 rows"]
    names += [f"{name} at 20" for name in names]
    assert [result["test"] for result in report["results"]] == [*names, "1 sequences", "3 sequences"]
    assert [(load["context"], load["sequences"]) for load in report["loads"]] == [(90, 1), (4, 3)]
    for result in report["results"]:
        assert len(result["seconds"]) == 2
        slow, fast = max(result["seconds"]), min(result["seconds"])
        tokens = {"prompt": 1, "decode": 1, "verify": 16, "batch": 4}[result["kind"]] * result["size"]
        assert tokens / slow <= result["tokens_per_second"] <= tokens / fast
        assert result["spread"] == pytest.approx((tokens / fast - tokens / slow) / 2)
        assert result["of_bandwidth"] == pytest.approx(result["bytes_per_second"] / 1e9)
        if result["kind"] == "prompt":
            assert result["of_matmul_rate"] == pytest.approx(result["flops_per_second"] / (1e10 * result["size"]))
        else:
            assert result["of_matmul_rate"] is None
    assert report["devices"][0]["limits"] == {"copy": 2e9, "read": 1e9, "products": {"9": 9e10, "70": 7e11}}
    one, three = report["results"][-2:]
    assert one["milliseconds_per_step"] == pytest.approx(1000 / one["tokens_per_second"])
    assert three["milliseconds_per_step"] == pytest.approx(3000 / three["tokens_per_second"])


def test_a_prompt_in_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Each step has the limit of products with its own rows."""
    flags = [
        "--target-devices",
        "cpu:0",
        "--chunk",
        "64",
        "-d",
        "0",
        "-p",
        "70",
        "-n",
        "",
        "--rows",
        "",
        "--sequences",
        "",
    ]
    report = run(capsys, *flags)
    assert set(report["devices"][0]["limits"]["products"]) == {"64", "6"}
    (result,) = report["results"]
    all_of_64 = result["flops_per_second"] / 64e10
    assert all_of_64 < result["of_matmul_rate"] < 2 * all_of_64


def test_a_device_without_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "--target-devices", "cpu:1")
    for result in report["results"]:
        assert result["of_bandwidth"] is not None and result["of_matmul_rate"] is None


def test_two_devices(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "--target-devices", "cpu:0,cpu:1", "--target-layer-split", "1,3")
    assert [len(d["limits"]["products"]) for d in report["devices"]] == [2, 0]
    assert [shard["layers"] for shard in report["loads"][0]["shards"]] == [[0, 1], [2, 7]]


def test_paging(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts and decoding far beyond the resident pages, with the pages swapped for them."""
    flags = ["--target-devices", "cpu:0,cpu:1", "--chunk", "128", "--kvflash", "512", "--kvflash-tau", "16"]
    lists = ["-p", "600", "-n", "30", "-d", "0,1000", "--rows", "", "--sequences", "", "-r", "1"]
    report = run(capsys, *flags, *lists)
    (load,) = report["loads"]
    assert (load["max_resident_tokens"], load["policy"]) == (512, "qk")
    (large,) = report["prefills"]
    assert (large["depth"], large["sequences"]) == (1000, 1)
    # Of 16 pages 8 are resident; a page that is swapped in replaces another.
    assert large["paging"]["pages_swapped_out"] - large["paging"]["pages_swapped_in"] == 16 - 8
    assert large["rescore"]["seconds"] > 0 and large["rescore"]["interval_tokens"] == 1000 // 45
    assert large["tokens_per_second"] == 1000 / large["seconds"]
    for result in report["results"]:
        paging = result["paging"]
        swaps = result["depth"] + result["size"] > 512
        assert (paging["pages_swapped_out"] > 0) == (paging["swapped_bytes"] > 0) == swaps
        # Once at the end of a prompt, and in a reply after 22 tokens.
        assert paging["rescores"] == swaps
    first = report["results"][0]["paging"]
    assert first["pages_swapped_out"] - first["pages_swapped_in"] == 10 - 8


def test_paging_of_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target-devices", "cpu:0", "--kvflash", "512", "--kvflash-policy", "lru"]
    lists = ["-d", "900", "-p", "", "-n", "", "--sequences", "2", "-r", "1"]
    assert main(["bench", str(MODEL), *flags, *lists]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for expected in (
        "2 x 932 tokens: loaded in",
        "512 resident tokens, policy lru",
        "2 x 900 tokens read at",
        "pages out, 0 in,",
        "scoring pages takes",
        "every 64 tokens",
    ):
        assert expected in text


def test_a_drafter_that_scores_pages(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = MODEL.parents[2] / "models" / "tiny"
    flags = ["--kvflash-policy", "drafter", "--kvflash-drafter", str(tiny / "drafter.gguf"), "--kvflash", "512"]
    rest = ["-d", "0", "-p", "600", "-n", "", "-r", "1", "--target-devices", "cpu:0", "--json"]
    assert main(["bench", str(tiny / "target.gguf"), *flags, *rest]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["loads"][0]["policy"] == "drafter" and report["results"][0]["paging"]["rescores"] == 2


def test_without_paging(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "--target-devices", "cpu:0")
    assert (
        {load["max_resident_tokens"] for load in report["loads"]}
        == {load["policy"] for load in report["loads"]}
        == {None}
    )
    assert {result["paging"] for result in report["results"]} == {None}
    assert [(prefill["depth"], prefill["paging"], prefill["rescore"]) for prefill in report["prefills"]] == [
        (20, None, None)
    ]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(MODEL), *SMALL, "--target-devices", "cpu:0"]) == 0
    text, told = capsys.readouterr()
    # Piped, it says what it does on standard error.
    lines = told.splitlines()
    assert lines[:2] == ["luce: measuring the devices", f"luce: loading {MODEL.name} for 1 x 90 tokens"], told
    assert {"luce: measuring verify 3 rows at 20", "luce: measuring 3 sequences"} <= set(lines)
    for expected in ("qwen35", "reads 1 GB/s, copies 2 GB/s, multiplies 0.09 TFLOP/s", "verify 3 rows at 20", "1 x 90"):
        assert expected in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-p", "1,x"], "-p: expected integers from 0 on separated by commas, got '1,x'"),
        (["--rows", "0"], "--rows: expected integers from 1 on separated by commas, got '0'"),
        (["-d", ""], "-d: name at least one depth"),
        (["--repeat", "0"], "--repeat: expected an integer from 1 on, got 0"),
        (["-p", "0", "-n", "0"], "-p, -n, --rows, --sequences: nothing to measure"),
    ],
)
def test_bad_lists(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(MODEL), *flags]) == 2
    assert capsys.readouterr().err == f"luce: {message}\n"


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        (["-p", "9,5000"], "-p: 5000"),
        (["-n", "9", "-d", "4090"], "-n, -d: 4099"),
        (["--rows", "5000"], "--rows: 5000"),
        (["-p", "0", "-n", "5000", "--sequences", "2"], "-n: 5000"),
    ],
)
def test_more_tokens_than_a_model_was_trained_for(
    flags: list[str], asked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is measured before.
    monkeypatch.setattr(bench, "limits", None)
    assert main(["bench", str(MODEL), "-p", "0", "-n", "0", *flags]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"luce: {asked} tokens: the model was trained for 4096"


def test_host_limits() -> None:
    reached = host_limits(Sizes(copied_bytes=1 << 20, side=64), [16, 3])
    assert set(reached.products) == {3, 16}
    assert min(reached.copy, reached.read, *reached.products.values()) > 1e6


def test_rate_of_packed_products() -> None:
    assert packed_rate(CpuDevice(), rows=16, side=256) > 1e6
