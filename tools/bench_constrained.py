#!/usr/bin/env python3
"""Measures what a constraint costs: the time of a step with masks, and the time to make a mask.

    tools/bench_constrained.py steps TARGET                 constrained and free replies of the same engine
    tools/bench_constrained.py masks TARGET                 a walk through the grammar; needs no device

Further flags of `steps` are those of `luce serve`: --target-devices cuda:0, --draft ngram, ... Results are one JSON
object with --json.

The schema is `nested`: records of strings, numbers, enums and an array of objects, in an array long enough for the
steps that are measured; --schema FILE takes another. The vocabulary is that of TARGET, or of the file of --tokenizer,
which must not have more tokens than TARGET's; text and quality of replies do not matter, and TARGET may have random
weights. A vocabulary of made-up words has cheaper masks than one of a language: `masks` says how long they take.

steps  medians of the time from one step's tokens to the next, for 1 and 64 (--sequences) replies at once that all run:
       without and with a constraint, greedy and with top-k 40. `cost` is their ratio less 1. `wait`: what a step waits
       for masks behind its layers, in the mean. Tokens per step are more than the sequences where tokens are forced.
masks  of a token (a step of one sequence), of 1 + 8 rows of a chain of guesses, and of the check of a guess.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from luce.assembly import open_backend
from luce.backend.layersplit import LayerSplitBackend
from luce.cli import progress
from luce.config.resolve import resolve
from luce.config.sampling import SamplingParams
from luce.draft.open import open_drafter
from luce.engine.engine_options import EngineOptions
from luce.engine.events import Event, Failed, Tokens
from luce.engine.loop import Engine
from luce.engine.sequence import Constraint
from luce.errors import LuceError, UsageError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.remote.open import open_placement
from luce.text.grammar import GrammarCompiler
from luce.text.grammar_options import GrammarOptions
from luce.text.tokenizer import Tokenizer

# First steps with all sequences, which are not timed: they build kernels, capture graphs and measure for the engine.
_FIRST = 16
_PROMPT = 32
#: seconds to wait for replies at most
_REPLY_TIMEOUT = 600
_RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "name": {"type": "string", "minLength": 4, "maxLength": 40},
        "kind": {"enum": ["person", "place", "organisation", "event"]},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 40}, "city": {"type": "string", "maxLength": 20}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "open": {"type": "boolean"},
    },
    "required": ["id", "name", "kind", "score", "address", "tags", "open"],
    "additionalProperties": False,
}
NESTED = {"type": "array", "items": _RECORD, "minItems": 200, "maxItems": 400}
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "top-k 40": {"temperature": 0.8, "top_k": 40, "seed": 1}}


class _Silent:
    """A reply without text."""

    stopped = None
    texts = ()

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _Steps:
    """The times at which a step's tokens arrive, while all replies run."""

    def __init__(self, count: int, steps: int) -> None:
        self._count = count
        self._wanted = _FIRST + steps
        self._seen: set[int] = set()
        #: time and tokens so far, where the first reply gets the tokens of a step
        self.marks: list[tuple[float, int]] = []
        self.tokens = 0
        self.error: LuceError | None = None
        self.done = threading.Event()

    def sink(self, number: int) -> Callable[[Event], None]:
        """The sink of one reply; on the engine's thread."""

        def take(event: Event) -> None:
            if isinstance(event, Failed):
                self.error = event.error
                self.done.set()
            if not isinstance(event, Tokens):
                return
            self._seen.add(number)
            self.tokens += len(event.tokens)
            if number == 0 and len(self._seen) == self._count:
                self.marks.append((time.perf_counter(), self.tokens))
                if len(self.marks) > self._wanted:
                    self.done.set()

        return take

    def medians(self) -> dict[str, float]:
        """Seconds and tokens of a step."""
        timed = self.marks[_FIRST:]
        seconds = [b[0] - a[0] for a, b in itertools.pairwise(timed)]
        tokens = (timed[-1][1] - timed[0][1]) / (len(timed) - 1)
        return {"step": statistics.median(seconds), "tokens_per_step": tokens}


def timed(
    engine: Engine, count: int, steps: int, vocab: int, make: Callable[[], Constraint | None], **sampling: Any
) -> dict[str, float]:
    """Medians of the steps of `count` replies at once."""
    found = _Steps(count, steps)
    random = np.random.default_rng(0)
    handles = [
        engine.submit(
            random.integers(0, vocab, _PROMPT).tolist(),
            SamplingParams(max_tokens=16 * (steps + _FIRST + count + 8), ignore_eos=True, **sampling),
            output=_Silent(),
            on_event=found.sink(number),
            constraint=make(),
        )
        for number in range(count)
    ]
    ended = found.done.wait(_REPLY_TIMEOUT)
    for handle in handles:
        handle.cancel()
    engine.wait_idle(_REPLY_TIMEOUT)
    if found.error is not None:
        raise found.error
    if not ended:
        raise LuceError(f"{steps} steps take longer than {_REPLY_TIMEOUT} s")
    return found.medians()


def step_times(
    target: str, schema: Any, tokenizer_path: str, sequences: Sequence[int], steps: int, **fields: Any
) -> dict[str, Any]:
    """Load a target and report the time of its steps with and without a constraint."""
    most = max(sequences)
    length = _PROMPT + 16 * (steps + _FIRST + most + 8) + 64
    settings = {"parallel": most, "max_ctx": length, "cache_ram": 0, **fields}
    config = resolve(settings)
    name = Path(target).name
    with ExitStack() as stack, progress.shown(f"loading {name}", lines=True) as wait:
        file = stack.enter_context(open_gguf(Path(target)))
        spec = read_spec(Source(target, file.metadata, file.tensors))
        compiler = _compiler(stack, tokenizer_path or target, spec.vocab)
        devices = open_placement(config)
        for device in devices:
            stack.callback(device.close)
        prepared = open_drafter(stack, config, file, spec, devices, context=length)
        ring, claims = (None, ()) if prepared is None else (prepared.ring, prepared.claims)
        backend: LayerSplitBackend = open_backend(stack, file, spec, devices, config, ring=ring, claims=claims)
        drafter = None if prepared is None else prepared.open(backend.shards[0], backend.shards[-1])
        options = EngineOptions.of(config, eos=frozenset(), chunk=backend.options.chunk, positions=0)
        engine = Engine(backend, options, drafter=drafter)
        stack.callback(engine.close)
        report: dict[str, Any] = {"target": name, "devices": [shard.info.device for shard in backend.shards]}
        report |= {"vocab": spec.vocab, "tokenizer": Path(tokenizer_path or target).name, "runs": []}
        for count in sequences:
            for way, sampling in SAMPLING.items():
                wait.step(f"measuring {count} sequences, {way}")
                results = {}
                for kind, given in (("free", None), ("constrained", schema), ("free again", None)):
                    made = engine.stats().masks

                    def make(given: Any = given) -> Constraint | None:
                        return None if given is None else compiler.constraint(_form(given))

                    results[kind] = timed(engine, count, steps, spec.vocab, make, **sampling)
                    now = engine.stats().masks
                    assert made is not None and now is not None
                    if given is not None:
                        waits = sum(now.waits.counts) - sum(made.waits.counts)
                        masks = sum(now.made.counts) - sum(made.made.counts)
                        results[kind]["wait"] = (now.waits.total - made.waits.total) / max(1, waits)
                        results[kind]["mask"] = (now.made.total - made.made.total) / max(1, masks)
                free = min(results["free"]["step"], results["free again"]["step"])
                cost = results["constrained"]["step"] / free - 1
                report["runs"].append({"sequences": count, "sampling": way, "cost": cost, **results})
        return report


def mask_times(target: str, schema: Any, count: int) -> dict[str, Any]:
    """The times to make masks on a walk of random tokens through a grammar."""
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(Path(target)))
        spec = read_spec(Source(target, file.metadata, file.tensors))
        compiler = _compiler(stack, target, spec.vocab)
        begun = time.perf_counter()
        compiler.constraint(_form({"type": "boolean"}))
        report: dict[str, Any] = {"vocabulary": Path(target).name, "vocab": spec.vocab}
        report["tokenizer_seconds"] = time.perf_counter() - begun
        begun = time.perf_counter()
        own = compiler.constraint(_form(schema))
        report["compile_seconds"] = time.perf_counter() - begun
        assert own is not None
        times: dict[str, list[float]] = {"mask": [], "chain of 8": [], "check of 8": [], "forced": [], "push": []}
        random = np.random.default_rng(0)
        words = np.empty((9, -(-spec.vocab // 32)), np.uint32)
        path: list[int] = []
        ends = frozenset[int]()

        def clocked(name: str, call: Callable[[], Any]) -> Any:
            at = time.perf_counter()
            result = call()
            times[name].append(time.perf_counter() - at)
            return result

        ahead = own.copy()
        for _ in range(count + 8):
            # The walk is eight tokens behind the one that finds its way.
            mask = ahead.mask(ends)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=spec.vocab, bitorder="little"))
            token = int(random.choice(allowed))
            ahead.push(token)
            path.append(token)
            if len(path) < 8:
                continue
            clocked("mask", lambda: own.fill((), (), ends, words[:1]))
            clocked("chain of 8", lambda: own.fill(path, (), ends, words))
            clocked("check of 8", lambda: own.valid(path, (), ends))
            clocked("forced", lambda: own.forced(15, ends))
            first = path.pop(0)
            clocked("push", partial(own.push, first))
        report["times"] = {
            name: {"median": statistics.median(own), "p99": float(np.quantile(own, 0.99)), "max": max(own)}
            for name, own in times.items()
        }
        return report


def _compiler(stack: ExitStack, path: str, vocab: int) -> GrammarCompiler:
    """A compiler for the vocabulary of a file and a model of so many tokens."""
    file = stack.enter_context(open_gguf(Path(path)))
    tokenizer = Tokenizer(file.metadata)
    if tokenizer.vocab > vocab:
        raise UsageError(f"--tokenizer {path}: {tokenizer.vocab} tokens, but the model has {vocab}")
    return GrammarCompiler(tokenizer, vocab, GrammarOptions(seconds=60))


def _form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "bench", "schema": schema}}


def show(report: dict[str, Any]) -> None:
    """Print a report."""
    if "times" in report:
        print(
            f"{report['vocabulary']}, {report['vocab']} tokens; library's tokenizer {report['tokenizer_seconds']:.2f} s"
        )
        print(f"compiled in {1e3 * report['compile_seconds']:.2f} ms")
        print(f"{'us':>12}{'median':>10}{'p99':>10}{'max':>10}")
        for name, own in report["times"].items():
            print(f"{name:>12}" + "".join(f"{1e6 * own[key]:10.1f}" for key in ("median", "p99", "max")))
        return
    devices = ", ".join(report["devices"])
    print(f"{report['target']} on {devices}, {report['vocab']} tokens, vocabulary of {report['tokenizer']}")
    print(f"{'sequences':>9}  {'sampling':10}{'free ms':>10}{'again ms':>10}{'masked ms':>11}{'cost':>9}", end="")
    print(f"{'wait us':>9}{'mask us':>9}{'tokens':>8}")
    for run in report["runs"]:
        free, again, masked = (run[kind] for kind in ("free", "free again", "constrained"))
        times = f"{1e3 * free['step']:10.3f}{1e3 * again['step']:10.3f}{1e3 * masked['step']:11.3f}"
        waits = f"{1e6 * masked['wait']:9.0f}{1e6 * masked['mask']:9.0f}{masked['tokens_per_step']:8.2f}"
        print(f"{run['sequences']:9}  {run['sampling']:10}{times}{100 * run['cost']:8.2f}%{waits}")


def _settings(flags: Sequence[str]) -> dict[str, str]:
    """`--max-ctx 4096` as fields of a Config."""
    if len(flags) % 2 or not all(flag.startswith("--") for flag in flags[::2]):
        raise SystemExit(f"bench_constrained: expected flags with one value each, got {' '.join(flags)}")
    return {flag[2:].replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}


def _schema(path: Path | None) -> Any:
    """The schema of a file. Raises UsageError if it is no JSON."""
    if path is None:
        return NESTED
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--schema {path}: {error}") from error


def main() -> int:
    """Print one report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    steps, masks = (verbs.add_parser(name) for name in ("steps", "masks"))
    for verb in (steps, masks):
        verb.add_argument("target")
        verb.add_argument("--schema", type=Path, help="a JSON schema; without one, `nested`")
        verb.add_argument("--json", action="store_true")
        verb.add_argument("-n", "--steps", type=int, default=200, help="steps that are measured")
    steps.add_argument("--tokenizer", default="", help="a GGUF file whose vocabulary the grammar uses")
    steps.add_argument("--sequences", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64])
    options, flags = parser.parse_known_args()
    try:
        schema = _schema(options.schema)
        if options.verb == "masks":
            if flags:
                parser.error(f"unrecognized arguments: {' '.join(flags)}")
            report = mask_times(options.target, schema, options.steps)
        else:
            settings = _settings(flags)
            report = step_times(options.target, schema, options.tokenizer, options.sequences, options.steps, **settings)
    except (LuceError, OSError) as error:
        print(f"bench_constrained: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, LuceError) else 1
    print(json.dumps(report)) if options.json else show(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
