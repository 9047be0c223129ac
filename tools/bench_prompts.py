"""Time to the first token of prompts that come at the same time.

    python -m tools.bench_prompts MODEL --tokens 12,40,100,250 --prompts 8

One line for each length, in milliseconds, medians of --repeat runs with other random tokens: `alone` of one prompt, and
of the prompts at once until the `last` first token and in the `mean`. `in_turn` is what they take one after the other.
Further settings: --set target_devices=cuda:0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import luce
from luce.errors import LuceError

#: the printed columns of a line, and their widths
_COLUMNS = {"tokens": 8, "prompts": 9, "alone": 9, "in_turn": 9, "last": 9, "mean": 9}


def first_tokens(model: luce.Model, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Milliseconds to the first token of each of these prompts, which come at the same time."""
    replies = [model.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True) for prompt in prompts]
    times = []
    for reply in replies:
        for _ in reply:
            pass
        assert reply.finish is not None
        times.append(1000 * (reply.finish.timings.queued + reply.finish.timings.prompt))
    return times


def bench(
    path: Path, lengths: Sequence[int], prompts: int, repeat: int = 5, **settings: Any
) -> Iterator[dict[str, int | float]]:
    """The lines of the report. `settings` are keywords of luce.load."""
    random = np.random.default_rng(0)
    own = {"max_ctx": max(lengths) + 1, "parallel": prompts, "cache_ram": 0, "kv_cache_dir": "off", **settings}
    with luce.load(path, **own) as model:

        def some(length: int, count: int) -> list[list[int]]:
            ids: list[list[int]] = random.integers(0, model.spec.vocab, (count, length)).tolist()
            return ids

        for length in lengths:
            # The first prompts of a length wait for page faults and for kernels that are loaded late.
            first_tokens(model, some(length, prompts))
            runs = [first_tokens(model, some(length, prompts)) for _ in range(repeat)]
            turns = [[first_tokens(model, [one])[0] for one in some(length, prompts)] for _ in range(repeat)]
            figures = {
                "alone": statistics.median(time for turn in turns for time in turn),
                "in_turn": statistics.median(map(sum, turns)),
                "last": statistics.median(map(max, runs)),
                "mean": statistics.median(map(statistics.fmean, runs)),
            }
            yield {"tokens": length, "prompts": prompts, **{name: round(time, 2) for name, time in figures.items()}}


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", default="12,40,100,250", help="tokens of a prompt, separated by commas")
    parser.add_argument("--prompts", type=int, default=8, help="prompts that come at the same time")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each length")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="another setting of Luce")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    given = parser.parse_args()
    lengths = [int(length) for length in given.tokens.split(",")]
    if min(*lengths, given.prompts, given.repeat) < 1:
        parser.error("--tokens, --prompts, --repeat: at least 1")
    settings: dict[str, Any] = dict(pair.split("=", 1) for pair in given.set)
    if not given.json:
        print("".join(name.rjust(width) for name, width in _COLUMNS.items()), flush=True)
    try:
        for line in bench(given.model, lengths, given.prompts, given.repeat, **settings):
            row = "".join(str(line[name]).rjust(width) for name, width in _COLUMNS.items())
            print(json.dumps(line) if given.json else row, flush=True)
    except LuceError as error:
        print(f"bench_prompts: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
