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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import luce

#: as tools.train_tiny.tasks.PASSKEY, and the forms with names of its neighbours there
_STATEMENT = "\nThe {n} is {v}. Remember it. {v} is the {n}.\n"
_QUESTION = "\nWhat is the {n}? The {n} is"
_PAIR, _LOOKUP = '\n    "{n}": {v},\n', '\n>>> values["{n}"]\n'
_NAMES = ("amber-river", "blue-falcon", "cedar-stone", "golden-otter", "olive-raven", "silver-maple")
_EVENT = "\nThe bell of the old tower rings.\n"
_COUNT = "\nHow many times does the bell of the old tower ring? It rings"
_TOPICS = ("copper lamps", "glass bells", "paper kites", "river boats", "winter bread")
_FILE = "\nFile {n}\nThis file is about {v}. It says how {v} are made, and who needs {v}.\n"
_THIRD = "\nThe third file, File 3, is about"
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """A prompt and the expected begin of its reply."""

    #: exactly `context` tokens
    ids: tuple[int, ...]
    answer: str
    #: a number is recalled if all cases of one depth are
    depth: int = 0


@dataclass(frozen=True)
class _Told:
    """Statements that are hidden in a text, and questions about them with their answers."""

    statements: tuple[str, ...]
    asked: tuple[tuple[str, str], ...]


def _key(random: np.random.Generator) -> str:
    return str(random.integers(10_000, 1_000_000))


def _needle(random: np.random.Generator) -> _Told:
    return _named(("pass key",), (_key(random),), _STATEMENT, _QUESTION)


def _two(random: np.random.Generator) -> _Told:
    """Two numbers, of which each is asked for."""
    return _named(("pass key", "secret code"), (_key(random), _key(random)), _STATEMENT, _QUESTION)


def _lookup(random: np.random.Generator) -> _Told:
    """Six names with values, of which one is asked for."""
    told = _named(_NAMES, tuple(_key(random) for _ in _NAMES), _PAIR, _LOOKUP)
    question, answer = told.asked[int(random.integers(len(_NAMES)))]
    return _Told(told.statements, ((question, answer.strip()),))


def _count(random: np.random.Generator) -> _Told:
    """An event that is told several times."""
    times = int(random.integers(2, 8))
    return _Told((_EVENT,) * times, ((_COUNT, f" {times}"),))


def _third(random: np.random.Generator) -> _Told:
    """Five files, of which the third one is to be summed up."""
    topics = random.permutation(_TOPICS).tolist()
    files = (_FILE.replace("{n}", str(number)).replace("{v}", topic) for number, topic in enumerate(topics, 1))
    return _Told(tuple(files), ((_THIRD, f" {topics[2]}"),))


def _named(names: Sequence[str], values: Sequence[str], statement: str, question: str) -> _Told:
    pairs = list(zip(names, values, strict=True))
    told = (statement.replace("{n}", name).replace("{v}", value) for name, value in pairs)
    return _Told(tuple(told), tuple((question.replace("{n}", name), f" {value}") for name, value in pairs))


#: what a prompt asks for
TASKS: dict[str, Callable[[np.random.Generator], _Told]] = {
    "needle": _needle,
    "two": _two,
    "lookup": _lookup,
    "count": _count,
    "third": _third,
}


def cases(
    model: luce.Model, context: int, depths: Sequence[float], filler: str = "", task: str = "needle"
) -> Iterator[Case]:
    """The cases of a task for each depth, from 0 to 1: that of the first statement, with the others in equal distances.

    `filler` (default: the licence) is repeated up to the length.
    """
    text = model.tokenize(filler or (_ROOT / "LICENSE").read_text())
    random = np.random.default_rng(0)
    for number, depth in enumerate(depths):
        told = TASKS[task](random)
        statements = [model.tokenize(statement) for statement in told.statements]
        places = [(depth + i / len(statements)) % 1 if i else depth for i in range(len(statements))]
        in_order = sorted(zip(places, statements, strict=True), key=lambda pair: pair[0])
        for asked, answer in told.asked:
            question = model.tokenize(asked)
            length = context - sum(map(len, statements)) - len(question)
            around = np.resize(np.roll(text, -97 * number), length).tolist()
            ids, before = list[int](), 0
            for place, statement in in_order:
                cut = round(place * length)
                ids += [*around[before:cut], *statement]
                before = cut
            yield Case((*ids, *around[before:], *question), answer, number)


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
