#!/usr/bin/env python3
"""Times of the prefix cache: a model's prompts are read, and resumed from devices, host memory and disk.

    tools/bench_cache.py MODEL [--tokens 32768] [--json]

Prompts are random ids, decoding is greedy. Times are those from the call to the first and to the second token for the
caller: the first token after a full hit needs no step, so copies may still be running.

    read          the prompt is new
    device        the prompt again: its pages are still on the devices
    memory        the prompt after another one has taken the devices' pages: all pages come from host memory
    disk          the prompt in a new engine, from files in the page cache of the system
    save          seconds from the end of the reply until prompt and reply are on the disk
    decode        tokens per second while a prompt is written to disk in the background, and without that
    turns         a chat: time to the first token, the prompt's new tokens, and bytes written, of each turn

All replies must have the same tokens; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import luce
from luce.kvcache.disk.tier import DiskTier

_REPLY = 16
#: tokens of a chat's replies, and of the user's turns: kernels depend on the number of rows
_SAID, _ASKED = 48, (200, 8, 24, 48, 90, 160, 300, 600, 24, 200)
#: tokens of the prompt that decodes beside a save, and of its longest reply
_SHORT, _BESIDE = 600, 1500


@dataclass
class Reply:
    """A greedy reply and its times."""

    tokens: list[int]
    #: seconds to the first token
    first: float
    #: seconds to the second token
    second: float
    #: the time of each token
    times: list[float]
    #: prompt tokens from the cache
    cached: int
    tier: str


def ask(model: luce.Model, prompt: list[int], count: int) -> Reply:
    """The greedy reply to a prompt."""
    started = time.perf_counter()
    generation = model.generate(prompt, max_tokens=count, temperature=0, ignore_eos=True)
    tokens, times = [], []
    for token in generation:
        if token.id >= 0:
            tokens.append(token.id)
            times.append(time.perf_counter())
    assert generation.finish is not None
    timings = generation.finish.timings
    return Reply(tokens, times[0] - started, times[1] - started, times, timings.cached_tokens, timings.cache_tier)


def disk_of(model: luce.Model) -> DiskTier:
    """The model's disk tier, once its directory is read."""
    assert model.engine.cache is not None and model.engine.cache.disk is not None
    disk = model.engine.cache.disk
    wait(lambda: disk.store is not None, 120)
    return disk


def idle(model: luce.Model) -> bool:
    """Whether no write is pending."""
    cache = model.engine.cache
    assert cache is not None and cache.saver is not None
    return not cache.saver.busy


def wait(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until a condition holds, at most `seconds`; returns the seconds waited."""
    started = time.perf_counter()
    while not condition() and time.perf_counter() - started < seconds:
        time.sleep(0.001)
    return time.perf_counter() - started


def written(model: luce.Model) -> int:
    """Bytes on the disk so far."""
    return disk_of(model).current_stats().written_bytes


class Bench:
    """The measurements, in order; each adds to `report`."""

    def __init__(self, path: str, directory: Path, tokens: int, options: dict[str, Any]) -> None:
        self._path = path
        self._directory = directory
        self._tokens = tokens
        self._first = min(2000, tokens)
        self._options = options
        self._random = np.random.default_rng(0)
        self.report: dict[str, Any] = {"tokens": tokens}
        self.same = True

    @contextlib.contextmanager
    def load(self, parallel: int) -> Iterator[luce.Model]:
        """The model with the cache directory, for `parallel` prompts."""
        chat = self._first + sum(_SAID + asked for asked in _ASKED)
        context = max(self._tokens, chat, _SHORT + _BESIDE) + 64
        options = {"max_ctx": context, "parallel": parallel, "kv_cache_budget": 1 << 16, **self._options}
        with luce.load(self._path, kv_cache_dir=str(self._directory), **options) as model:
            self.report["placement"] = model.placement
            self._vocab = model.spec.vocab
            disk_of(model)
            # Kernels are loaded and graphs captured by the first prompts of any kind.
            for _ in range(2):
                ask(model, self.ids(700), _REPLY)
            wait(lambda: idle(model), 60)
            yield model

    def ids(self, count: int) -> list[int]:
        """A new prompt."""
        drawn: list[int] = self._random.integers(0, self._vocab, count).tolist()
        return drawn

    def _note(self, name: str, reply: Reply, expected: Reply | None = None) -> None:
        same = expected is None or reply.tokens == expected.tokens
        self.same &= same
        self.report[name] = {
            "first": reply.first,
            "second": reply.second,
            "cached": reply.cached,
            "tier": reply.tier,
            "same": same,
        }

    def tiers(self) -> None:
        """Read, resumed on the devices, from memory, from the disk."""
        with self.load(1) as model:
            prompt, other = self.ids(self._tokens), self.ids(self._tokens)
            cold = ask(model, prompt, _REPLY)
            self._note("read", cold)
            self._note("device before it is written", ask(model, prompt, _REPLY), cold)
            disk = disk_of(model)
            before = (disk.stats.raw_bytes, disk.stats.written_bytes)
            self.report["save"] = {"seconds": wait(lambda: idle(model), 120)}
            self._note("device", ask(model, prompt, _REPLY), cold)
            ask(model, other, 2)
            self._note("memory before the other is written", ask(model, prompt, _REPLY), cold)
            wait(lambda: idle(model), 120)
            ask(model, other, 2)
            self._note("memory", ask(model, prompt, _REPLY), cold)
            wait(lambda: idle(model), 120)
            raw, stored = disk.stats.raw_bytes - before[0], disk.stats.written_bytes - before[1]
            self.report["save"] |= {"raw": raw, "stored": stored, "work": disk.stats.save_seconds}
            again = ask(model, prompt, 64)
            self.report["step"] = {"median": statistics.median(np.diff(again.times))}
        with self.load(1) as model:
            self._note("disk", ask(model, prompt, _REPLY), cold)

    def beside(self) -> None:
        """Decoding while a prompt is written to disk, and afterwards."""
        with self.load(2) as model:
            short = self.ids(_SHORT)
            ask(model, short, 64)
            wait(lambda: idle(model), 60)
            ask(model, self.ids(self._tokens), 2)
            began = time.perf_counter()
            ended: list[float] = []
            generation = model.generate(short, max_tokens=_BESIDE, temperature=0, ignore_eos=True)
            times: list[float] = []
            for _ in generation:
                times.append(time.perf_counter())
                if not ended and idle(model):
                    ended.append(times[-1])
                if ended and len(times) > 40 and times[-1] - ended[0] > max(2.0, ended[0] - began):
                    generation.close()
            gaps = np.diff(times)
            end = ended[0] if ended else times[-1]
            during = [g for t, g in zip(times, gaps, strict=False) if t < end]
            after = [g for t, g in zip(times, gaps, strict=False) if t >= end]
            self.report["decode"] = {
                "seconds of the save": end - began,
                "during": len(during) / sum(during) if during else None,
                "after": len(after) / sum(after) if after else None,
                "slowest during": sorted(during)[-5:],
                "slowest after": sorted(after)[-5:],
            }

    def turns(self) -> None:
        """A chat; before each turn a pause in which all writes finish."""
        with self.load(1) as model:
            history: list[int] = self.ids(self._first)
            turns = []
            for asked in _ASKED:
                before = written(model)
                reply = ask(model, history, _SAID)
                gaps = np.diff(reply.times)
                wait(lambda: idle(model), 60)
                turns.append(
                    {
                        "prompt": len(history),
                        "new": len(history) - reply.cached,
                        "first": reply.first,
                        "slowest gap": float(gaps.max()),
                        "median gap": statistics.median(gaps),
                        "written": written(model) - before,
                    }
                )
                history = [*history, *reply.tokens, *self.ids(asked)]
            self.report["turns"] = turns


def main() -> int:
    """Print the report as JSON, or as lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--cache-ram", type=int, default=16384, help="MiB")
    parser.add_argument("--target-devices", default="auto")
    parser.add_argument("--parts", default="tiers,beside,turns", help="measurements, comma-separated")
    parser.add_argument("--directory", type=Path, help="for snapshots; a temporary one by default")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options: dict[str, Any] = {"cache_ram": arguments.cache_ram}
    if arguments.target_devices != "auto":
        options["target_devices"] = arguments.target_devices
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        bench = Bench(arguments.model, Path(place), arguments.tokens, options)
        for part in arguments.parts.split(","):
            getattr(bench, part)()
            if not arguments.json:
                for name in [n for n in bench.report if n != "placement"]:
                    print(name, json.dumps(bench.report.pop(name)), flush=True)
    if arguments.json:
        print(json.dumps(bench.report))
    return 0 if bench.same else 1


if __name__ == "__main__":
    sys.exit(main())
