"""Time to the first token and right replies, of whole and of compressed prompts.

    python -m tools.bench_prefill models/tiny/target.gguf --prefill-drafter models/tiny/drafter.gguf --lengths 1024,4096

Each prompt is filler text with statements, the first one at one of the depths, and a question behind it
(tools/bench_retrieval.py): `needle` a pass key, `two` two of them, both of which have to come back, `lookup` one of six
names with values, `count` how often something happened. It counts if the greedy reply begins with the answer. One line
for each task, length and keep ratio; ratio 1 is the whole prompt, which the small model does not read, and `auto` what
`--prefill-compression auto` chooses by the times of the lines before, with --set prefill_keep_ratio. Times are medians
in seconds over the depths: `first` from the prompt's ids to the first token. Of it the small model takes `drafter`, the
choice of the kept tokens `selection`, and the model `target`. Further settings: --set target_devices=cuda:0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
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


#: the printed columns of a line, and their widths
_COLUMNS = {
    "task": 6,
    "tokens": 8,
    "ratio": 6,
    "result": 12,
    "kept": 8,
    "first": 9,
    "drafter": 9,
    "selection": 10,
    "target": 9,
    "recalled": 9,
}


def measure(model: luce.Model, asked: Sequence[Case], ratio: float | str) -> dict[str, Any]:
    """One line of the report: times, kept tokens, whether the reply of each depth is right, and the replies.

    `ratio`: a keep ratio, or `auto`.
    """
    if isinstance(ratio, str):
        wanted = CompressionRequest(ratio)
        # Another first token: the spans of the same prompt with the same keep ratio are cached.
        asked = [replace(case, ids=(case.ids[1], *case.ids[1:])) for case in asked]
    else:
        wanted = CompressionRequest("off") if ratio == 1 else CompressionRequest("always", ratio)
    prompts: list[CompressedPrompt] = []
    times, replies = list[tuple[float, ...]](), list[list[int]]()
    found: dict[int, bool] = {}
    for case in asked:
        began = time.perf_counter()
        prompts.append(model.compression.read(case.ids, request=wanted))
        read = time.perf_counter()
        reply = model.generate(list(prompts[-1].ids), max_tokens=_REPLY, temperature=0, ignore_eos=True)
        ids = [next(reply).id]
        end, drafter = time.perf_counter(), prompts[-1].seconds
        times.append((end - began, drafter, read - began - drafter, end - read))
        ids += [token.id for token in reply if token.id >= 0]
        replies.append(ids)
        found[case.depth] = found.get(case.depth, True) and model.detokenize(ids).startswith(case.answer)
    seconds = (round(statistics.median(each), 4) for each in zip(*times, strict=True))
    return {
        "tokens": len(asked[0].ids),
        "ratio": ratio,
        "result": " ".join(sorted({prompt.verdict.value for prompt in prompts})),
        "kept": round(statistics.median(len(prompt.ids) for prompt in prompts)),
        **dict(zip(("first", "drafter", "selection", "target"), seconds, strict=True)),
        "recalled": sum(found.values()),
        "depths": len(found),
        "by_depth": "".join(".X"[right] for right in found.values()),
        "replies": replies,
    }


def bench(
    target: Path,
    drafter: Path,
    lengths: Sequence[int],
    ratios: Sequence[float | str],
    depths: int = 20,
    filler: str = "",
    tasks: Sequence[str] = ("needle",),
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """The lines of the report. `settings` are keywords of luce.load. Raises LuceError if the small model fails."""
    with luce.load(
        target,
        **{"max_ctx": max(lengths) + _ROOM, "kv_cache_dir": "off", "cache_ram": 0, **settings},
        prefill_drafter=str(drafter),
    ) as model:
        for task, length in itertools.product(tasks, lengths):
            every = list(cases(model, length, [*np.linspace(0, 1, depths).tolist(), 0.5], filler, task))
            asked = [case for case in every if case.depth < depths]
            for ratio in ratios:
                # The first prompt of a length waits for kernel builds and page faults.
                measure(model, every[-1:], ratio)
                yield {"task": task, **measure(model, asked, ratio)}
        assert model.compression.compressor is not None
        if (state := model.compression.compressor.stats().state) != "on":
            raise LuceError(f"{drafter}: {state}")


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--prefill-drafter", type=Path, required=True, metavar="FILE")
    parser.add_argument("--lengths", default="4096", help="tokens of a prompt, separated by commas")
    parser.add_argument(
        "--ratios", default="1,0.1,0.05", help="keep ratios, separated by commas; 1: the whole prompt; auto"
    )
    parser.add_argument("--depths", type=int, default=20, help="prompts of each length, with the number elsewhere")
    parser.add_argument("--tasks", default="needle", help=f"of {', '.join(TASKS)}, separated by commas")
    parser.add_argument("--text", type=Path, help="filler text in which the numbers are hidden")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="another setting of Luce")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    ratios = [ratio if ratio == "auto" else float(ratio) for ratio in given.ratios.split(",")]
    tasks = given.tasks.split(",")
    if unknown := set(tasks) - TASKS.keys():
        parser.error(f"--tasks: there is no {min(unknown)}")
    settings: dict[str, Any] = dict(pair.split("=", 1) for pair in given.set)
    filler = given.text.read_text() if given.text else ""
    if not given.json:
        print("".join(name.rjust(width) for name, width in _COLUMNS.items()), flush=True)
    try:
        for line in bench(
            given.target, given.prefill_drafter, lengths, ratios, given.depths, filler, tasks, **settings
        ):
            row = "".join(str(line[name]).rjust(width) for name, width in _COLUMNS.items())
            # At once: a run of several minutes may be ended.
            print(json.dumps(line) if given.json else f"{row} of {line['depths']}  {line['by_depth']}", flush=True)
    except LuceError as error:
        print(f"bench_prefill: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
