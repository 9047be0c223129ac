#!/usr/bin/env python3
"""Share of numbers that a model recalls from long texts, for each --kvflash-policy.

    tools/bench_retrieval.py models/tiny/target.gguf --pool 512 --context 4096 --policies qk,lru
    tools/bench_retrieval.py models/tiny/target.gguf --policies drafter --set kvflash_drafter=models/tiny/drafter.gguf

Each prompt is filler text with a pass key at one of the depths, followed by the question (the plain form of
tools/train_tiny/tasks.py). It counts if the greedy reply begins with the number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import luce

#: as tools.train_tiny.tasks.PASSKEY
_STATEMENT = "\nThe pass key is {v}. Remember it. {v} is the pass key.\n"
_QUESTION = "\nWhat is the pass key? The pass key is"
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A prompt and the expected begin of its reply."""

    #: exactly `context` tokens
    ids: tuple[int, ...]
    answer: str


def cases(model: luce.Model, context: int, depths: Sequence[float], filler: str = "") -> Iterator[Case]:
    """One case for each depth, from 0 to 1. `filler` (default: the licence) is repeated up to the length."""
    text = model.tokenize(filler or (_ROOT / "LICENSE").read_text())
    random = np.random.default_rng(0)
    for number, depth in enumerate(depths):
        key = str(random.integers(10_000, 1_000_000))
        statement, question = model.tokenize(_STATEMENT.replace("{v}", key)), model.tokenize(_QUESTION)
        length = context - len(statement) - len(question)
        around = np.resize(np.roll(text, -97 * number), length).tolist()
        cut = round(depth * length)
        yield Case((*around[:cut], *statement, *around[cut:], *question), f" {key}")


def recalled(model: luce.Model, asked: Sequence[Case], tokens: int = 8) -> Iterator[tuple[bool, list[int]]]:
    """Whether each number was found, and the reply's tokens; as many cases at a time as the model has slots."""
    slots = model.config.parallel
    for begin in range(0, len(asked), slots):
        some = asked[begin : begin + slots]
        replies = [model.generate(case.ids, max_tokens=tokens, temperature=0, ignore_eos=True) for case in some]
        for case, reply in zip(some, replies, strict=True):
            ids = [token.id for token in reply if token.id >= 0]
            yield model.detokenize(ids).startswith(case.answer), ids


def main() -> None:
    """Print one line per policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pool", default="512", help="as --kvflash; off: all pages stay on the devices")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--depths", type=int, default=20)
    parser.add_argument("--policies", default="qk,lru")
    parser.add_argument("--text", type=Path, help="filler text in which the numbers are hidden")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="another setting of Luce")
    given = parser.parse_args()
    settings: dict[str, Any] = dict(pair.split("=", 1) for pair in given.set)
    filler = given.text.read_text() if given.text else ""
    for policy in given.policies.split(",") if given.pool != "off" else ("",):
        chosen = {"kvflash": given.pool, "kvflash_policy": policy} if policy else {}
        with luce.load(given.model, max_ctx=given.context + 64, kv_cache_dir="off", **chosen, **settings) as model:
            asked = list(cases(model, given.context, np.linspace(0, 1, given.depths).tolist(), filler))
            started = time.perf_counter()
            found = [right for right, _ in recalled(model, asked)]
            seconds = time.perf_counter() - started
            paging = model.engine.stats().paging
        marks = "".join(".X"[right] for right in found)
        print(f"{policy or 'no paging'}: {sum(found)} of {len(found)}, by depth {marks}, {seconds:.1f} s; {paging}")


if __name__ == "__main__":
    main()
