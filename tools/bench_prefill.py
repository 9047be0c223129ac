"""Time to the first token and right replies, of whole and of compressed prompts.

    python -m tools.bench_prefill models/tiny/target.gguf --prefill-drafter models/tiny/drafter.gguf --lengths 1024,4096

Each prompt is filler text with statements, the first one at one of the depths, and a question behind it
(tools/bench_retrieval.py): `needle` a pass key, `two` two of them, both of which have to come back, `lookup` one of six
names with values, `count` how often something happened. It counts if the greedy reply begins with the answer. One line
for each task, length and keep ratio; ratio 1 is the whole prompt, which the small model does not read. Times are
medians in seconds over the depths: `first` from the prompt's ids to the first token, of which the small model took
`drafter`. Further settings: --set target_devices=cuda:0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import luce
from luce.compress.compressor import CompressedPrompt
from luce.errors import LuceError
from luce.text.prompt_compression import CompressionRequest
from tools.bench_retrieval import TASKS, Case, cases

# Tokens of the context for the reply, and tokens of a reply.
_ROOM, _REPLY = 64, 8


def measure(model: luce.Model, asked: Sequence[Case], ratio: float) -> dict[str, Any]:
    """One line of the report: times, kept tokens, whether the reply of each depth is right, and the replies."""
    wanted = CompressionRequest("off" if ratio == 1 else "always", None if ratio == 1 else ratio)
    prompts: list[CompressedPrompt] = []
    first, replies = list[float](), list[list[int]]()
    found: dict[int, bool] = {}
    for case in asked:
        began = time.perf_counter()
        prompts.append(model.compression.read(case.ids, request=wanted))
        reply = model.generate(list(prompts[-1].ids), max_tokens=_REPLY, temperature=0, ignore_eos=True)
        ids = [next(reply).id]
        first.append(time.perf_counter() - began)
        ids += [token.id for token in reply if token.id >= 0]
        replies.append(ids)
        found[case.depth] = found.get(case.depth, True) and model.detokenize(ids).startswith(case.answer)
    return {
        "tokens": len(asked[0].ids),
        "ratio": ratio,
        "kept": round(statistics.median(len(prompt.ids) for prompt in prompts)),
        "first": round(statistics.median(first), 4),
        "drafter": round(statistics.median(prompt.seconds for prompt in prompts), 4),
        "recalled": sum(found.values()),
        "depths": len(found),
        "by_depth": "".join(".X"[right] for right in found.values()),
        "replies": replies,
    }


def bench(
    target: Path,
    drafter: Path,
    lengths: Sequence[int],
    ratios: Sequence[float],
    depths: int = 20,
    filler: str = "",
    tasks: Sequence[str] = ("needle",),
    **settings: Any,
) -> list[dict[str, Any]]:
    """The lines of the report. `settings` are keywords of luce.load. Raises LuceError if the small model fails."""
    with luce.load(
        target,
        **{"max_ctx": max(lengths) + _ROOM, "kv_cache_dir": "off", "cache_ram": 0, **settings},
        prefill_drafter=str(drafter),
    ) as model:
        lines = []
        for task, length in itertools.product(tasks, lengths):
            every = list(cases(model, length, [*np.linspace(0, 1, depths).tolist(), 0.5], filler, task))
            asked = [case for case in every if case.depth < depths]
            for ratio in ratios:
                # The first prompt of a length waits for kernel builds and page faults.
                measure(model, every[-1:], ratio)
                lines.append({"task": task, **measure(model, asked, ratio)})
        assert model.compression.compressor is not None
        if (state := model.compression.compressor.stats().state) != "on":
            raise LuceError(f"{drafter}: {state}")
    return lines


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--prefill-drafter", type=Path, required=True, metavar="FILE")
    parser.add_argument("--lengths", default="4096", help="tokens of a prompt, separated by commas")
    parser.add_argument("--ratios", default="1,0.1,0.05", help="keep ratios, separated by commas; 1: the whole prompt")
    parser.add_argument("--depths", type=int, default=20, help="prompts of each length, with the number elsewhere")
    parser.add_argument("--tasks", default="needle", help=f"of {', '.join(TASKS)}, separated by commas")
    parser.add_argument("--text", type=Path, help="filler text in which the numbers are hidden")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="another setting of Luce")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    ratios = [float(ratio) for ratio in given.ratios.split(",")]
    tasks = given.tasks.split(",")
    if unknown := set(tasks) - TASKS.keys():
        parser.error(f"--tasks: there is no {min(unknown)}")
    settings: dict[str, Any] = dict(pair.split("=", 1) for pair in given.set)
    filler = given.text.read_text() if given.text else ""
    try:
        lines = bench(given.target, given.prefill_drafter, lengths, ratios, given.depths, filler, tasks, **settings)
    except LuceError as error:
        print(f"bench_prefill: {error}", file=sys.stderr)
        return error.exit_code
    for line in lines:
        if given.json:
            print(json.dumps(line))
        else:
            print(
                f"{line['task']:6} {line['tokens']:7} tokens, ratio {line['ratio']:g}: {line['kept']} kept, "
                f"first {line['first']} s (drafter {line['drafter']} s), "
                f"{line['recalled']} of {line['depths']} recalled {line['by_depth']}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
