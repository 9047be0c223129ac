"""Parser, dispatch, exit statuses; and the verb inspect on a tiny model."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

import luce
from luce.cli.main import EXAMPLES, VERBS, main, parse
from luce.runtime.device import Memory
from luce.runtime.host import HostDevice
from tests.support.standard_streams import TerminalStream, no_input
from tests.support.terminal import ROOT

__all__ = ["no_input"]
MODEL = ROOT / "tests/reference/qwen3-a-MIX.gguf"
HYBRID = ROOT / "tests/reference/qwen35-a-Q8_0.gguf"


def test_help_is_quick() -> None:
    # Measured by its imports: the verbs' libraries take most of a second.
    code = (
        "import sys\nfrom luce.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('numpy', 'rich', 'prompt_toolkit', 'aiohttp', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")
    assert all(f"    {name} " in done.stdout for name in VERBS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: VERB (luce --help tells more)"),
        (["nonsense"], "nonsense: no such verb (luce --help tells more)"),
        (["srve", "x"], "srve: no such verb; did you mean serve? (luce --help tells more)"),
        (["run", "x", "y", "--temprature", "1"], "--temprature 1: unknown; did you mean --temperature? (luce run "),
        (["run", "x", "y", "--ctx-size=5"], "--ctx-size=5: unknown; did you mean --max-ctx? (luce run "),
        (
            ["serve", "x", "--reasoning-effort-x-high=5"],
            "--reasoning-effort-x-high=5: unknown; did you mean --effort? (",
        ),
        (
            ["serve", "x", "--prefill-skip-park"],
            "--prefill-skip-park: unknown; did you mean --draft-residency persistent? (",
        ),
        (
            ["serve", "x", "--disk-prefix-cache-compress"],
            "--disk-prefix-cache-compress: unknown; did you mean --prefill-f",
        ),
        (
            ["serve", "x", "--prefill-upstream-base", "http://x"],
            "--prefill-upstream-base http://x: unknown: compressed prompts go to no other server (luce serve ",
        ),
        (["run", "--help", "x"], "--help x: expected --help or --help all (luce run --help tells more)"),
        (["run"], "the following arguments are required: MODEL (luce run --help tells more)"),
        (["serve", "x", "--target-devices"], "argument --target-devices/--devices: expected one argument (luce serve "),
        (["chat", "x", "--xyzzy"], "--xyzzy: unknown (luce chat --help tells more)"),
        (["run", "x", "y", "--max-c", "5"], "--max-c 5: unknown; did you mean --max-ctx? (luce run --help tells more)"),
        (["chat", "x", "-o", "top_k=-2", "-n", "3"], "-o top_k=-2: expected "),
        (["chat", "x", "-n", "0", "--seed", "y"], "--max-tokens: expected an integer in 1..2147483647 (4k is 4096), "),
        (["cache"], "the following arguments are required: ACTION (luce cache --help tells more)"),
    ],
)
def test_argparse_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    assert printed.err.startswith(f"luce: {message}") and printed.err.count("\n") == 1


def test_all_wrong_values_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-ctx", "-1", "--top-p", "2", "-o", "seed=x", "-o", "nonsense=1", "--max-tokens", "0"]
    assert main(["run", "x.gguf", "hi", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "luce: --max-ctx: expected an integer in 0..2147483647 (4k is 4096), got '-1'; --top-p: expected "
    )
    assert [part.partition(":")[0] for part in error.split("; ")[2:]] == ["-o seed=x", "-o nonsense=1", "--max-tokens"]
    assert error.count("\n") == 1


@pytest.mark.parametrize("verb", ["run", "chat", "inspect"])
@pytest.mark.parametrize(("model", "status"), [("nowhere", 2), ("/nowhere.gguf", 3), (str(Path(__file__)), 3)])
def test_model_errors(verb: str, model: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, model, *(["hi"] if verb == "run" else [])]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("luce: ") and printed.err.count("\n") == 1
    assert model in printed.err


def test_chat_takes_the_values_of_replies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/set max_tokens\n/set seed\n/set top_k\n/set min_p\n"))
    flags = ["--target-devices", "cpu:0", "--max-ctx", "64", "--kv-cache-dir", "off"]
    assert main(["chat", str(MODEL), *flags, "-n", "2k", "--seed", "7", "-o", "top-k=3", "-o", "min_p=0.5"]) == 0
    assert capsys.readouterr().err.splitlines() == ["max_tokens 2048", "seed 7", "top_k 3", "min_p 0.5"]


def test_help_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "`luce --help all`" in " ".join(capsys.readouterr().out.split())
    texts = []
    for arguments in (["--help"], *([verb, "--help", "all"] for verb in VERBS)):
        assert main(arguments) == 0
        texts.append(capsys.readouterr().out)
    for flag in ("--help", "-h"):
        assert main([flag, "all"]) == 0
        assert capsys.readouterr().out == "\n\n".join(texts)


def test_help_is_short_unless_all_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert main([verb, "--help"]) == 0
        short = capsys.readouterr().out
        assert main([verb, "--help", "all"]) == 0
        every = capsys.readouterr().out
        usage = short.partition("\n\n")[0]
        assert usage.startswith(f"usage: luce {verb} [FLAG...]") and usage.count("luce") == 1
        assert f"example: {EXAMPLES[verb].partition(' | ')[0]}" in short
        assert set(re.findall(r"--[a-z][a-z-]+", short)) <= set(re.findall(r"--[a-z][a-z-]+", every)) | {"--help"}
        if verb in ("serve", "chat", "run"):
            assert "--kvflash-tau" in every and "--kvflash-tau" not in short
            assert f"luce {verb} --help all" in short and len(short.splitlines()) < 75


@pytest.mark.parametrize(
    ("verb", "flag"),
    [
        ("join", "--cluster"),
        ("cluster", "--cluster"),
        ("shard", "--prefill-drafter"),
        ("doctor", "--measure-budget"),
    ],
)
def test_the_short_help_has_flags_of_the_verb_that_are_called_as_a_setting(
    verb: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--help"]) == 0
    assert f"  {flag} " in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_examples_of_the_help_are_valid(verb: str) -> None:
    command = EXAMPLES[verb].rpartition("luce ")[2] if verb != "run" else EXAMPLES[verb].partition("luce ")[2]
    assert parse(shlex.split(command)).verb == verb


def test_inspect_is_not_cut_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["inspect", str(HYBRID)]) == 0
    text = capsys.readouterr().out
    assert str(HYBRID) in text and "\u2026" not in text


def test_inspect_cuts_no_path_at_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As long as a path in the hub's cache.
    model = tmp_path / ("folder" * 20) / "model.gguf"
    model.parent.mkdir()
    model.symlink_to(MODEL)
    screen = TerminalStream()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["inspect", str(model), "--devices", "cpu:0,cpu:1"]) == 0
    text = screen.getvalue()
    assert "\u2026" not in text and str(model) in "".join(text.split())


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["inspect", *arguments, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_inspect_against_the_gguf_package(capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspected(capsys, str(MODEL))
    reader = GGUFReader(MODEL)
    bytes_by_type: dict[str, int] = {}
    for tensor in reader.tensors:
        name = tensor.tensor_type.name
        bytes_by_type[name] = bytes_by_type.get(name, 0) + int(tensor.n_bytes)
    assert facts["bytes"] == bytes_by_type
    assert facts["family"] == reader.fields["general.architecture"].contents() == "qwen3"
    assert facts["layers"] == {"attention": reader.fields["qwen3.block_count"].contents()}
    assert facts["hidden"] == reader.fields["qwen3.embedding_length"].contents()
    assert facts["context"] == reader.fields["qwen3.context_length"].contents()
    assert facts["tokenizer"]["pre"] == reader.fields["tokenizer.ggml.pre"].contents()
    assert facts["chat_template"] is True
    assert facts["dialect"]["reasoning"] == {"open": "<think>", "close": "</think>"} and facts["dialect"]["notes"]
    assert facts["dialect"]["calls"]["mismatch"] is None


def test_inspect_says_that_a_call_is_not_read_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "of one call that the chat template writes, 0 are found"
    monkeypatch.setattr("luce.cli.inspect.call_mismatch", lambda chat: why if chat.template is not None else None)
    assert inspected(capsys, str(MODEL))["dialect"]["calls"]["mismatch"] == why
    assert main(["inspect", str(MODEL)]) == 0
    assert why in " ".join(capsys.readouterr().out.split())


def test_inspect_plan(capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspected(capsys, str(HYBRID), "--target-devices", "cpu:0,cpu:1", "--target-layer-split", "1,3")
    assert [shard["layers"] for shard in facts["plan"]] == [[0, 1], [2, 7]]
    assert [shard["device"] for shard in facts["plan"]] == ["cpu:0", "cpu:1"]
    whole = inspected(capsys, str(HYBRID), "--target-devices", "cpu:0")
    for name in ("kv_per_token", "state_per_sequence"):
        assert facts[name] == sum(shard[name] for shard in facts["plan"]) == whole["plan"][0][name]
    # Two of eight layers attend: K and V of 2 heads of 64 in 4 bytes.
    assert facts["kv_per_token"] == 2 * 2 * 2 * 64 * 4


def test_inspect_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(HYBRID)]) == 0
    text = capsys.readouterr().out
    for expected in ("6 gated DeltaNet, 2 attention", "Q8_0", "794,512", "cpu:0", "0..7", "4,096 tokens"):
        assert expected in text


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["run", str(HYBRID), "--dry-run", "--json", *arguments]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_dry_run_is_the_plan_of_inspect_and_of_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target-devices", "cpu:0,cpu:1,cpu:2", "--max-ctx", "300", "--parallel", "2"]
    facts = dry_run(capsys, *flags)
    assert facts["served"] == {"context": 300, "parallel": 2} and facts["fits"] is True and "kvflash" not in facts
    told = inspected(capsys, str(HYBRID), *flags)
    figures = ("device", "layers", "weights", "state", "activation_bytes_per_token")
    figures += ("experts_on_cpu", "experts_on_cpu_bytes")
    for shard, other in zip(facts["plan"], told["plan"], strict=True):
        assert [shard[name] for name in (*figures, "kv_per_token", "fits")] == [
            other[name] for name in (*figures, "kv_per_token", "fits")
        ]
    with luce.load(HYBRID, target_devices="cpu:0,cpu:1,cpu:2", max_ctx=300, parallel=2) as model:
        planned = [{**{name: shard[name] for name in figures}, "unpacked": 0} for shard in facts["plan"]]
        assert model.placement == planned
        hidden = model.spec.hidden
    assert [shard["activation_bytes_per_token"] for shard in facts["plan"]] == [4 * hidden, 4 * hidden, 0]


def test_dry_run_with_kvflash(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target-devices", "cpu:0,cpu:1", "--max-ctx", "4000", "--parallel", "2", "--kvflash", "513"]
    facts, told = dry_run(capsys, *flags), inspected(capsys, str(HYBRID), *flags)
    assert facts["kvflash"] == {
        "max_resident_tokens": 768,
        "reason": "768 resident tokens of each sequence of up to 4000",
    }
    (group,) = told["kv"]
    assert (group["positions"], group["bytes"]) == (768, 768 * group["per_token"])
    with luce.load(HYBRID, target_devices="cpu:0,cpu:1", max_ctx=4000, parallel=2, kvflash="513") as model:
        assert [shard["state"] for shard in model.placement] == [shard["state"] for shard in facts["plan"]]
    short = dry_run(capsys, "--max-ctx", "300", "--kvflash", "auto")
    assert short["kvflash"] == {
        "max_resident_tokens": None,
        "reason": "off: the context of 300 tokens is too short for 512 resident tokens, the minimum",
    }
    assert main(["serve", str(HYBRID), "--dry-run", "--max-ctx", "4000", "--kvflash", "auto"]) == 0
    text = capsys.readouterr().out
    for expected in ("resident tokens of", "bytes free / 2 / 1 sequences", "bytes per token", "at most"):
        assert expected in " ".join(text.split())


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--kvflash", "many"], "--kvflash: expected off, a number of tokens, auto or auto:N, got 'many'"),
        (["--kvflash", "0"], "--kvflash: expected off, a number of tokens, auto or auto:N, got '0'"),
        (["--kvflash", "auto:"], "--kvflash: expected off, a number of tokens, auto or auto:N, got 'auto:'"),
        (["--kvflash", "512", "--kvflash-policy", "best"], "--kvflash-policy: expected"),
        (["--kvflash", "512", "--kvflash-tau", "0"], "--kvflash-tau: expected an integer in 1.."),
        (["--kvflash", "512", "--kvflash-host-mb", "x"], "--kvflash-host-mb: expected a size"),
        (["--kvflash-tau", "9"], "--kvflash-tau: requires --kvflash"),
        (["--kvflash", "off", "--kvflash-host-mb", "9"], "--kvflash-host-mb: requires --kvflash"),
    ],
)
def test_pool_settings_that_make_no_sense(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(HYBRID), *flags]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["serve", "chat", "run"])
def test_dry_run_shows_the_plan(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dry-run", "--devices", "cpu:0,cpu:1", "--layer-split", "1,3", "--parallel", "2", "--max-ctx", "1000"]
    assert main([verb, str(HYBRID), *flags]) == 0
    text = capsys.readouterr().out
    for expected in ("plan: 2 sequences of 1,000 tokens", "cpu:0", "0..1", "cpu:1", "2..7", "B/token", "yes"):
        assert expected in text


def test_dry_run_of_a_model_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "memory", lambda self: Memory(10**6, 10**9))
    assert main(["serve", str(HYBRID), "--dry-run", "--target-device", "cpu:0"]) == 3
    printed = capsys.readouterr()
    assert "NO" in printed.out
    assert re.fullmatch(r"luce: cpu:0: layers 0\.\.7 need \d+ bytes, 940000 are free\n", printed.err)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target-devices", "cpu:0,"], "--target-devices: expected backend:index"),
        (["--devices", ",".join(f"cpu:{i}" for i in range(9))], "bad layer split for 9 devices and 8 layers"),
        (["--max-ctx", "9999999"], "--max-ctx 9999999: the model was trained for 4096 tokens"),
        (["--target-device", "hip:77"], "--target-device hip:77: "),
    ],
)
@pytest.mark.parametrize("verb", [["inspect"], ["run", "--dry-run"]])
def test_refused_plans(verb: list[str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb[0], str(HYBRID), *verb[1:], *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and printed.err.count("\n") == 1
