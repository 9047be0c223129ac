#!/usr/bin/env python3
"""Measures a drafter: tokens per step, and the time of a step.

    tools/bench_draft.py acceptance TARGET --draft DRAFT    by task, with models/tiny/prompts.json or --prompts FILE
    tools/bench_draft.py steps TARGET --draft DRAFT         by rows of a verification, and a plain step
    tools/bench_draft.py load TARGET --draft DRAFT          tokens a second of several sequences, with acceptance given
    tools/bench_draft.py make TARGET OUT                    writes a draft of the published size, random weights

TARGET, and DRAFT as --draft takes it. Further flags are those of `luce serve`: --target-devices cuda:0,cuda:1,
--target-shard-ipc-bin PYTHON, --draft-device, ... Results are one JSON object with --json.

acceptance  greedy replies, one at a time; all proposed rows are verified. A step is a forward of the target behind the
            prompt: tokens per step is the gain of drafting if all steps took the same time. The histogram counts the
            steps that committed 1, 2, ... tokens.
steps       time from one token to the next in the engine, with drafting, verification and the rewind of rejected rows.
            Medians of one sequence. A plain step is a step of the target without a drafter. `draft` is the time from
            the call of the drafter to its proposals, `messages` counts messages to daemons in a step. `pays from`: the
            tokens that a step must commit to be as fast as plain steps.
load        tokens a second of --sequences greedy replies at once, while all of them run, plain and drafted. The draft
            computes its blocks, and each token of them is then right with the chance of --acceptance, whatever its
            weights are. The engine chooses the rows, and who rests. `plain` is the mean of a run before and one after
            the drafted ones, `spread` how far these two differ; `gain`: drafted by plain; `equal`: whether the
            replies are those without drafts, token for token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

import luce
from luce.backend.layersplit import LayerSplitBackend
from luce.cli import progress
from luce.config.sampling import SamplingParams
from luce.draft.drafter import Draftable, Drafter, PendingProposals, Proposal
from luce.engine.engine_options import EngineOptions
from luce.engine.events import Event, Failed, Tokens
from luce.engine.loop import Engine
from luce.errors import LuceError, UsageError
from luce.ipc.channel import Channel
from luce.ipc.lifecycle import Ping

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.draft_file import make
from tools.draft_load import load_table
from tools.draft_target import REPLY_TIMEOUT, Silent, opened

PROMPTS = Path(__file__).resolve().parents[1] / "models" / "tiny" / "prompts.json"
# First steps, which are not timed: they build kernels, capture graphs and measure for the engine.
_FIRST = 8


@dataclasses.dataclass
class Accepted:
    """The tokens committed by the steps of some replies."""

    replies: int = 0
    #: number of steps by the number of tokens that they committed
    histogram: Counter[int] = dataclasses.field(default_factory=Counter)

    @property
    def steps(self) -> int:
        """Forwards of the target behind the prompts."""
        return self.histogram.total()

    @property
    def tokens(self) -> int:
        """Tokens behind the prompts' first ones."""
        return sum(count * steps for count, steps in self.histogram.items())

    def report(self) -> dict[str, Any]:
        """For JSON."""
        mean = self.tokens / self.steps if self.steps else 0.0
        histogram = {str(count): self.histogram[count] for count in sorted(self.histogram)}
        return {"replies": self.replies, "steps": self.steps, "tokens_per_step": mean, "histogram": histogram}


def replied(engine: Engine, prompt: Sequence[int], tokens: int) -> list[tuple[float, int, Tokens]]:
    """The steps of a greedy reply: the time at its end, the messages sent to daemons so far, and its tokens."""
    events: list[tuple[float, int, Event]] = []
    sent, send = [0], Channel.send

    def counted(self: Any, number: int, message: Any, *arguments: Any, **options: Any) -> None:
        # Heartbeats depend on the clock, not on steps.
        sent[0] += not isinstance(message, Ping)
        send(self, number, message, *arguments, **options)

    Channel.send = counted  # type: ignore[method-assign]
    try:
        engine.submit(
            prompt,
            SamplingParams(max_tokens=tokens),
            output=Silent(),
            on_event=lambda event: events.append((time.perf_counter(), sent[0], event)),
        )
        if not engine.wait_idle(REPLY_TIMEOUT):
            raise TimeoutError(f"a reply takes longer than {REPLY_TIMEOUT} s")
    finally:
        Channel.send = send  # type: ignore[method-assign]
    *_, last = events
    if isinstance(last[2], Failed):
        raise last[2].error
    return [(at, count, event) for at, count, event in events if isinstance(event, Tokens)]


def accepted(
    model: luce.Model, prompts: Sequence[Sequence[int]], tokens: int, on_progress: Callable[[int, int], None]
) -> Accepted:
    """Greedy replies of up to `tokens` tokens to prompts, one after another. `on_progress` gets the replies that are
    finished, and their number."""
    found = Accepted(len(prompts))
    for number, prompt in enumerate(prompts):
        on_progress(number, len(prompts))
        events = replied(model.engine, prompt, tokens)
        # The first token comes with the prompt.
        found.histogram.update([len(event.tokens) for _, _, event in events][1:])
    return found


def acceptance(target: str, prompts: dict[str, list[str]], tokens: int, count: int, **fields: Any) -> dict[str, Any]:
    """Load a target with its drafter and report the tokens of its steps by task, for `count` prompts of each task,
    evenly spread (0: all)."""
    settings = {"parallel": 1, "verify_width": 16, "cache_ram": 0, **fields}
    name = Path(target).name
    with progress.shown(f"loading {name}", lines=True) as wait, luce.load(target, **settings) as model:
        drafter = model.engine.stats().draft
        if drafter is not None and not drafter.on:
            raise LuceError(f"drafting is off: {drafter.state}")
        tasks = {}
        for task, texts in prompts.items():
            chosen = texts[:: max(1, len(texts) // count)][:count] if count else texts
            wait.step(f"{task}: {len(chosen)} replies of up to {tokens} tokens")
            tasks[task] = accepted(model, [model.tokenize(text) for text in chosen], tokens, wait.update).report()
        stats = model.engine.stats().draft
        assert stats is not None
        return {
            "target": model.name,
            "draft": stats.facts,
            "state": stats.state,
            "devices": [part["device"] for part in model.placement],
            "tokens": tokens,
            "acceptance_rate": stats.acceptance_rate,
            "tasks": tasks,
        }


class TimedDrafter:
    """A drafter that outlives its engines, and records the time of its proposals."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        """The drafter's proposals."""
        at = time.perf_counter()
        begun = self._drafter.propose(asked)

        def wait() -> Sequence[Proposal]:
            proposals = begun()
            self.seconds.append(time.perf_counter() - at)
            return proposals

        return wait

    def close(self) -> None:
        """The drafter stays open."""


def timed(
    backend: LayerSplitBackend, drafter: Drafter | None, width: int, prompt: Sequence[int], steps: int
) -> dict[str, Any]:
    """Medians over up to `steps` steps of one sequence behind a prompt, with `width` rows each."""
    timed_drafter = None if drafter is None else TimedDrafter(drafter)
    options = EngineOptions(eos=frozenset(), max_queue=1, chunk=backend.options.chunk, verify_width=width)
    engine = Engine(backend, options, drafter=timed_drafter)
    try:
        # The last steps of a reply have fewer rows.
        events = replied(engine, prompt, _FIRST + steps + width)
        stats = engine.stats().draft
    finally:
        engine.close()
    counts = [len(event.tokens) for _, _, event in events]
    whole = sum(sum(counts[i:]) >= width for i in range(len(counts)))
    at, messages = (np.array([event[i] for event in events[min(_FIRST, whole // 2) : whole]]) for i in (0, 1))
    if len(at) < 2:
        raise LuceError(f"{width} rows: a reply of {sum(counts)} tokens is too short to measure steps")
    result = {
        "rows": width,
        "steps": len(at) - 1,
        "step": float(np.median(np.diff(at))),
        "messages": float(np.median(np.diff(messages))),
    }
    if timed_drafter is not None:
        assert stats is not None
        if stats.state != "on" or not stats.steps:
            raise LuceError(f"no tokens were drafted: {stats.state}")
        result["draft"] = statistics.median(timed_drafter.seconds)
        result["tokens_per_step"] = stats.tokens_per_step
    return result


def step_times(target: str, rows: Sequence[int], depth: int, steps: int, **fields: Any) -> dict[str, Any]:
    """Load a target without and then with its drafter, and report the time of steps behind `depth` tokens."""
    fields = {"max_ctx": depth + 2 * _FIRST + steps + 64, **fields}
    report: dict[str, Any] = {"target": Path(target).name, "draft": fields["draft"], "depth": depth}
    with progress.shown(f"loading {report['target']}", lines=True) as wait:
        with opened(target, **{**fields, "draft": ""}) as (backend, _):
            wait.step("measuring steps without a drafter")
            prompt = np.random.default_rng(0).integers(0, backend.capacity.vocab, depth).tolist()
            report["devices"] = [shard.info.device for shard in backend.shards]
            plain = timed(backend, None, 1, prompt, steps)
        report["plain"], report["widths"] = plain, []
        wait.step(f"loading {report['target']} with its drafter")
        with opened(target, **fields) as (backend, drafter):
            assert drafter is not None
            report["facts"] = drafter.describe()
            for width in rows:
                if 1 < width <= min(drafter.block + 1, backend.capacity.verify_rows):
                    wait.step(f"measuring steps of {width} rows")
                    report["widths"].append(timed(backend, drafter, width, prompt, steps))
    for result in report["widths"]:
        result["of_plain"] = result["step"] / plain["step"]
    return report


def show(report: dict[str, Any]) -> None:
    """Print a report."""
    print(f"{report['target']} with {report['draft']} on {', '.join(report['devices'])}")
    for task, found in report.get("tasks", {}).items():
        shares = " ".join(f"{count}:{steps}" for count, steps in found["histogram"].items())
        print(f"{task:12}{found['tokens_per_step']:7.3f} tokens per step in {found['steps']} steps; {shares}")
    if "load" in report:
        heads = f"{'sequences':>9}{'acceptance':>12}{'plain tok/s':>13}{'spread':>8}{'drafted':>11}{'gain':>8}"
        more = f"{'spread':>8}{'plain step ms':>15}{'beside drafts':>15}"
        print(f"{heads}{more}{'tokens a step':>15}{'equal':>7}")
    for found in report.get("load", ()):
        speeds = f"{found['plain']:13.1f}{found['plain_spread']:8.3f}{found['drafted']:11.1f}{found['gain']:8.3f}"
        rest = f"{found['gain_spread']:8.3f}{1e3 * found['plain_step']:15.3f}{1e3 * found['drafted_plain_step']:15.3f}"
        rest += f"{found['tokens_per_step']:15.2f}{'yes' if found['equal'] else 'no':>7}"
        print(f"{found['sequences']:9}{found['acceptance']:12g}{speeds}{rest}")
    if "plain" in report:
        plain = report["plain"]
        print(f"plain step {1e3 * plain['step']:8.3f} ms, {plain['messages']:g} messages")
        print(f"{'rows':>5}{'draft ms':>11}{'step ms':>11}{'pays from':>11}{'8 tokens':>11}{'messages':>11}")
        for found in report["widths"]:
            ratio = found["of_plain"]
            faster = f"{8 / ratio:.2f}x" if found["rows"] >= 8 else ""
            times = f"{1e3 * found['draft']:11.3f}{1e3 * found['step']:11.3f}"
            print(f"{found['rows']:5}{times}{ratio:11.3f}{faster:>11}{found['messages']:11g}")


def _settings(flags: Sequence[str]) -> dict[str, str]:
    """`--max-ctx 4096` as fields of a Config."""
    if len(flags) % 2 or not all(flag.startswith("--") for flag in flags[::2]):
        raise SystemExit(f"bench_draft: expected flags with one value each, got {' '.join(flags)}")
    return {flag[2:].replace("-", "_"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}


def _prompts(path: Path) -> dict[str, list[str]]:
    """Texts by task. Raises UsageError if the file is not such a list."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts {path}: {error}") from error
    lists = list(found.values()) if isinstance(found, dict) else [None]
    if not all(isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts) for texts in lists):
        raise UsageError(f"--prompts {path}: expected a list of texts for each task")
    return found  # type: ignore[no-any-return]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _chances(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if not all(0 <= chance <= 1 for chance in found):
        raise ValueError(text)
    return found


def main() -> int:
    """Print one report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    both = {name: verbs.add_parser(name) for name in ("acceptance", "steps", "load")}
    for verb in both.values():
        verb.add_argument("target")
        verb.add_argument("--draft", required=True)
        verb.add_argument("--json", action="store_true")
    both["acceptance"].add_argument("--prompts", type=Path, default=PROMPTS, help="JSON: a list of texts by task")
    both["acceptance"].add_argument("--count", type=int, default=0, help="prompts of each task, 0 for all")
    both["acceptance"].add_argument("-n", "--tokens", type=int, default=256, help="most tokens of a reply")
    both["steps"].add_argument("--rows", type=_numbers, default=[2, 4, 8, 16])
    both["steps"].add_argument("-d", "--depth", type=int, default=600, help="tokens of the prompt")
    both["steps"].add_argument("-n", "--steps", type=int, default=64)
    both["load"].add_argument("--sequences", type=_numbers, default=[1, 2, 4, 8, 16, 32, 64])
    both["load"].add_argument("--acceptance", type=_chances, default=[0.0, 0.3, 0.6, 0.8])
    both["load"].add_argument("-d", "--depth", type=int, default=600, help="tokens of the prompts")
    both["load"].add_argument("-n", "--tokens", type=int, default=256, help="tokens of a reply")
    both["load"].add_argument("--lookup", action="store_true", help="look up texts that repeat too, as a server does")
    both["load"].add_argument("--rounds", type=int, default=3, help="times that plain and drafted replies take turns")
    maker = verbs.add_parser("make")
    maker.add_argument("target", type=Path)
    maker.add_argument("out", type=Path)
    maker.add_argument("--type", choices=["bf16", "q8_0"], default="q8_0")
    maker.add_argument("--layers", type=int, default=5)
    maker.add_argument("--heads", type=_numbers, default=[32, 8, 128], help="query heads, key heads, and their size")
    maker.add_argument("--generation", type=int, choices=[1, 2], default=1, help="2: a DFlash2 draft")
    maker.add_argument("--block", type=int, help="default: 16, of a DFlash2 draft 8")
    options, flags = parser.parse_known_args()
    if options.verb == "make" and len(options.heads) != 3:
        parser.error("--heads: expected three numbers")
    try:
        if options.verb == "make":
            kind = Type[options.type.upper()]
            with progress.shown(f"writing {options.out}", lines=True):
                shape = options.layers, options.heads, options.block
                make(options.target, options.out, kind, *shape, generation=options.generation)
            return 0
        fields = _settings(flags) | {"draft": options.draft}
        if options.verb == "acceptance":
            prompts = _prompts(options.prompts)
            report = acceptance(options.target, prompts, options.tokens, options.count, **fields)
        elif options.verb == "load":
            sizes = options.depth, options.tokens
            given = options.sequences, options.acceptance
            report = load_table(options.target, *given, *sizes, rounds=options.rounds, lookup=options.lookup, **fields)
        else:
            report = step_times(options.target, options.rows, options.depth, options.steps, **fields)
    except (LuceError, OSError) as error:
        print(f"bench_draft: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, LuceError) else 1
    print(json.dumps(report)) if options.json else show(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
