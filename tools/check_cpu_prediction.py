#!/usr/bin/env python3
"""Compares the predicted speed of a model on the CPU with `luce bench`, before and after a run that is observed.

    tools/check_cpu_prediction.py MODEL.gguf [--prompt 512] [--rounds 3] [--repeat 3]

The prompt has 256 tokens at least, as shorter pieces are not observed.

Each round measures the CPU anew, in a cache folder of the tool's own, predicts decoding behind a prompt and the prompt,
and measures both with `luce bench`: in turn, as the speed of a machine changes from one minute to the next. Then it
reads 17 prompts and generates 1100 tokens, of which Luce keeps how long they took, predicts again, and measures once
more. It prints the rounds with their medians, what is predicted once observed beside the medians of the two
measurements around that, and what the first layer is predicted to take in a decoding step and in a piece of the prompt.
The machine must be idle.

Exit code 1 if a median prediction is off by more than 30 %, or by more than 15 % once it is corrected by what was
observed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: allowed shares between predicted and measured rates: before and after the observed run
BEFORE, AFTER = 0.30, 0.15
# Luce keeps what it observed after 1000 decoding steps, and after 16 pieces of prompts.
_TOKENS, _PROMPTS = 1100, 17
_ROOT = Path(__file__).resolve().parent.parent
_GENERATE = """
import random
import sys
import luce
context, tokens, prompts, rows = map(int, sys.argv[2:])
with luce.load(sys.argv[1], target_devices="cpu:0", optimize="balanced", max_ctx=context, kv_cache_dir="off") as model:
    for seed in range(prompts):
        ids = random.Random(seed).choices(range(1000, 2000), k=rows)
        assert sum(1 for _ in model.generate(ids, max_tokens=1, ignore_eos=True)) == 1
    made = sum(1 for _ in model.generate("Count.", max_tokens=tokens, ignore_eos=True, temperature=0.0))
    assert made == tokens
"""


def luce(environment: dict[str, str], *words: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "luce", *words, "--json"], cwd=_ROOT, env=environment, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rates(plan: dict[str, Any]) -> tuple[float, float]:
    """Predicted tokens per second of decoding and of the prompt."""
    return plan["decode_tok_s"], plan["prompt_tok_s"]


def measured(benches: Sequence[dict[str, Any]], prompt: int) -> tuple[float, float]:
    """Measured tokens per second: of decoding behind a prompt, and of the prompt."""
    found = {result["test"]: result["tokens_per_second"] for bench in benches for result in bench["results"]}
    return found[f"decode 128 at {prompt}"], found[f"prompt {prompt}"]


def medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median rates of decoding and of the prompt."""
    decode, prompt = map(statistics.median, zip(*pairs, strict=True))
    return decode, prompt


def off(predicted: float, measured: float) -> float:
    """The share by which a predicted rate differs from the measured one."""
    return predicted / measured - 1


def verdict(predicted: Sequence[float], measured: Sequence[float], most: float) -> bool:
    """Whether predicted rates differ by `most` of the measured ones at most."""
    return all(abs(off(rate, real)) <= most for rate, real in zip(predicted, measured, strict=True))


def line(name: str, predicted: Sequence[float], measured: Sequence[float]) -> str:
    """A line of the table."""
    pairs = list(zip(predicted, measured, strict=True))
    return f"{name:15}" + "   ".join(f"{rate:8.1f} {real:8.1f} {off(rate, real):+5.0%}" for rate, real in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, predict and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    chosen = parser.parse_args(arguments)
    context = 2 * max(chosen.prompt, _TOKENS)
    common = [str(chosen.model), "--devices", "cpu:0", "--max-ctx", str(context)]
    wanted = [*common, "--optimize-prompt", str(chosen.prompt)]

    def bench(environment: dict[str, str]) -> tuple[float, float]:
        tests = ("-p", str(chosen.prompt), "-n", "0"), ("-p", "0", "-n", "128", "-d", str(chosen.prompt))
        runs = [luce(environment, "bench", *common, *test, "-r", str(chosen.repeat)) for test in tests]
        return measured(runs, chosen.prompt)

    print("tok/s            decode: predicted, measured    prompt: predicted, measured", flush=True)
    predicted, real = list[tuple[float, float]](), list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CACHE_DIRECTORY": folder}
        for number in range(chosen.rounds):
            plan = luce(environment, "plan", *wanted, "--measure", "--explain-layer", "0")
            predicted.append(rates(plan))
            real.append(bench(environment))
            print(line(f"round {number + 1}", predicted[-1], real[-1]), flush=True)
        words = [str(chosen.model), *map(str, (context, _TOKENS, _PROMPTS, chosen.prompt))]
        subprocess.run([sys.executable, "-c", _GENERATE, *words], cwd=_ROOT, env=environment, check=True)
        corrected = luce(environment, "plan", *wanted)
        around = medians([real[-1], bench(environment)])
    before, usual = medians(predicted), medians(real)
    print(line("medians", before, usual))
    print(line("once observed", rates(corrected), around))
    (profile,) = corrected["profiles"].values()
    ratios, noisy = (profile["observed"], profile["observed_prompts"]), ", ".join(profile["noisy"])
    print(f"observed: decoding {ratios[0]}, prompts {ratios[1]}; noisy: {noisy or 'nothing'}")
    for phases in plan["layer"].values():
        for phase, terms in phases.items():
            spent = ", ".join(f"{name} {seconds * 1e6:,.0f} us" for name, seconds in terms.items() if seconds)
            print(f"layer 0, {phase}: {spent}")
    good = verdict(before, usual, BEFORE) and verdict(rates(corrected), around, AFTER)
    return 0 if good and None not in ratios else 1


if __name__ == "__main__":
    raise SystemExit(main())
