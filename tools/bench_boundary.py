#!/usr/bin/env python3
"""The cost of a boundary to a daemon in a decode step, part by part, compared with the same split in one process.

    tools/bench_boundary.py MODEL --devices cuda:0,cuda:1          two GPUs, the second in a daemon
    tools/bench_boundary.py MODEL --devices cpu:0,cpu:1 -n 32      the same without GPUs
    tools/bench_boundary.py MODEL --copies                         GPUs without the kernels of kernels/handover.cu

This process has the first device, a daemon has the others: one boundary. Both processes note the time (the machine has
one clock) at the begin and the end of their methods; the program itself takes no notes. Events of the devices time work
and copies. Figures are medians over the steps of a run; the parts are those of the run with the median sum.

    copy out  from the end of the first shard's work until the rows are in shared memory
    message   from the time when this process sees that the copy out is done until it has notified the daemon
    wake-up   until the daemon's device starts to copy in (a GPU waits for that by itself) or the daemon's thread runs.
              Where the GPUs hand rows over by themselves, message and copy in are parts of this, and it is counted from
              the time when this process sees that the rows are there
    queue     the time in which the daemon's thread queues the step, unless it did so before
    reply     from the time when the daemon sees that its work is done until this process has the tokens, by a flag in
              shared memory or by a message; negative if this process sees the flag before the daemon does
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Also the daemon runs this tree.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.serving_options import ServingOptions
from luce.bench.measure import Stepper
from luce.cli.main import main as luce
from luce.config.settings import Config
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.remote import daemon
from luce.remote.daemon_shard import ServedModel
from luce.remote.device import RemoteDevice
from luce.remote.messages import Forward
from luce.remote.open import open_placement
from luce.remote.rpc import Request
from luce.remote.shard import RemoteShard
from luce.runtime.driver import Driver

Notes = dict[str, list[float]]
# First steps, which do not count: they compile kernels and capture graphs.
_FIRST = 12


def noted(
    notes: Notes, owner: Any, method: str, begin: str, end: str, only: Callable[..., bool] = lambda *arguments: True
) -> None:
    """Make a method note its begin and end under these names, for calls whose arguments satisfy `only`."""
    inner = getattr(owner, method)

    def outer(*arguments: Any, **options: Any) -> Any:
        count = only(*arguments)
        if begin and count:
            notes.setdefault(begin, []).append(time.monotonic())
        result = inner(*arguments, **options)
        if end and count:
            notes.setdefault(end, []).append(time.monotonic())
        return result

    setattr(owner, method, outer)


def use_copies() -> None:
    """Let no GPU of this process hand over or take over rows."""
    Driver.maps_registered = lambda self, index: False  # type: ignore[method-assign]


def serve(out: Path, copies: str, arguments: Sequence[str]) -> int:
    """The daemon: `luce shard` with notes, which it writes at its end."""
    if copies == "copies":
        use_copies()
    notes: Notes = {"work": [], "copy in": []}
    session, model = daemon.Session, ServedModel
    noted(notes, model, "announce", "announced", "prepared")
    noted(notes, session, "_handle", "notified", "queued", lambda self, message: isinstance(message, Forward))
    noted(notes, session, "_answer_first", "done", "sent")
    events: list[tuple[Any, Any]] = []
    build = model.__init__

    def watched(self: Any, *parts: Any) -> None:
        build(self, *parts)
        notes["flags"] = [float(self.uses_flags)]
        # Rows of a step that are taken over: the time of that is mostly spent waiting.
        notes["takes over"] = [float(self.uses_flags and self.devices[0].maps_pinned)]
        if self._input_link is not None and not notes["takes over"][0]:
            self._input_link._watch = lambda start, end: events.append((start, end))
        count: Callable[[], tuple[float, ...]] = self.seconds

        def seconds() -> tuple[float, ...]:
            found = count()
            notes["work"].append(sum(found))
            while events and events[0][1].done():
                start, end = events.pop(0)
                notes["copy in"].append(end.seconds_since(start))
            return found

        self.seconds = seconds

    model.__init__ = watched  # type: ignore[method-assign, assignment]
    try:
        return luce(arguments)
    finally:
        out.write_text(json.dumps(notes))


@contextlib.contextmanager
def opened(path: Path, devices: str, rows: int, context: int, settings: dict[str, Any]) -> Iterator[LayerSplitBackend]:
    """The model in equal parts on devices."""
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(path))
        spec = read_spec(Source(str(path), file.metadata, file.tensors))
        placed = open_placement(Config(target_devices=tuple(devices.split(",")), **settings))
        for device in placed:
            stack.callback(device.close)
        backend = LayerSplitBackend(
            file, spec, placed, ServingOptions(layer_split=(1.0,) * len(placed), context=context, chunk=rows, slots=1)
        )
        stack.callback(backend.close)
        yield backend


def measured(
    backend: LayerSplitBackend, options: argparse.Namespace, notes: Notes, all_totals: list[list[float]]
) -> tuple[float, float, list[int]]:
    """Prompt tokens per second, seconds of a decode step, the tokens; notes of the decode steps, and `totals` before
    each run and behind the last."""
    stepper = Stepper(backend, options.prompt)
    prompts = []
    for _ in range(3):
        stepper.move_to(0, 0)
        began = time.monotonic()
        stepper.read(0, options.prompt)
        prompts.append(time.monotonic() - began)
    tokens = []
    for number in range(_FIRST + options.runs * options.steps):
        if number >= _FIRST and (number - _FIRST) % options.steps == 0:
            all_totals.append(totals(backend))
        notes.setdefault("begun", []).append(time.monotonic())
        stepper.decode([0])
        notes.setdefault("ended", []).append(time.monotonic())
        tokens.append(stepper.newest(0))
    all_totals.append(totals(backend))
    return (
        options.prompt / min(prompts),
        between((notes, "begun"), (notes, "ended"), options.runs * options.steps),
        tokens,
    )


def between(begin: tuple[Notes, str], end: tuple[Notes, str], steps: int, later: int = 0) -> float:
    """Seconds from one note to another, the median over `steps` steps before the last `later`."""
    early, late = (notes[name][len(notes[name]) - steps - later :][:steps] for notes, name in (begin, end))
    return statistics.median(late - early for early, late in zip(early, late, strict=True))


def totals(backend: LayerSplitBackend) -> list[float]:
    """Seconds of each shard's work so far, and of the first copy between them."""
    times = backend.times()
    copies = times[0].copies
    return [*(shard.work.total for shard in times), 0.0 if copies is None else copies.total]


def per_step(all_totals: list[list[float]], run: int, steps: int) -> list[float]:
    """The increase of `totals` per step of a run."""
    return [(after - before) / steps for before, after in zip(*all_totals[run : run + 2], strict=True)]


def parts(ours: Notes, theirs: Notes, own: list[float], steps: int, later: int) -> dict[str, float]:
    """Seconds of each part of a boundary, and in parentheses of the work beside it: of a run of `steps` steps, `later`
    steps before the end. `own`: what `per_step` says of the run."""

    def passed(begin: tuple[Notes, str], end: tuple[Notes, str]) -> float:
        return between(begin, end, steps, later)

    def median(name: str) -> float:
        return statistics.median(theirs[name][len(theirs[name]) - steps - later :][:steps])

    first, _, copy_out = own
    work, message, queue, copy_in = median("work"), passed((ours, "there"), (ours, "notified")), 0.0, 0.0
    begin, ahead = "notified", 0.0
    if theirs["takes over"][0]:
        begin, message = "there", 0.0
    else:
        copy_in = median("copy in")
    if theirs["flags"][0]:
        wake = passed((ours, begin), (theirs, "done")) - work - copy_in
        ahead = passed((theirs, "prepared"), (ours, begin))
    else:
        wake = passed((ours, "notified"), (theirs, "notified"))
        queue = passed((theirs, "notified"), (theirs, "done")) - work - copy_in
    return {
        "copy out": copy_out,
        "message": message,
        "wake-up": wake,
        "queue": queue,
        "copy in": copy_in,
        "reply: there": passed((theirs, "done"), (ours, "seen")),
        "reply: read": passed((ours, "seen"), (ours, "read")),
        "(handed on, as in one process)": passed((ours, "read"), (ours, "ended")),
        "(the daemon's message sent meanwhile)": passed((theirs, "done"), (theirs, "sent")),
        "(step)": passed((ours, "begun"), (ours, "ended")),
        "(first shard's work)": first,
        "(daemon's work)": work,
        "(announcing, while the first shard works)": passed((ours, "announcing"), (ours, "announced")),
        "(queueing in the daemon meanwhile)": passed((theirs, "announced"), (theirs, "prepared")),
        "(queued before the input was there by)": ahead,
    }


def boundary(found: dict[str, float]) -> float:
    """The sum of the parts of a boundary."""
    return sum(seconds for name, seconds in found.items() if name[0] != "(")


def main() -> int:
    """Measure both ways and print the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("-n", "--steps", type=int, default=128, help="decode steps of a run")
    parser.add_argument("-r", "--runs", type=int, default=5, help="runs, one behind the other")
    parser.add_argument("-p", "--prompt", type=int, default=2048, help="prompt tokens")
    parser.add_argument("--transport", default="auto", help="as --shard-transport")
    parser.add_argument("--copies", action="store_true", help="GPUs copy rows of few steps too, as on HIP")
    options = parser.parse_args()
    if options.copies:
        use_copies()
    steps, runs = options.steps, range(options.runs)
    context = options.prompt + len(runs) * steps + 64
    here_totals: list[list[float]] = []
    our_totals: list[list[float]] = []
    with opened(options.model, options.devices, options.prompt, context, {}) as backend:
        here: Notes = {}
        prompt, step, tokens = measured(backend, options, here, here_totals)
        per_run = [per_step(here_totals, run, steps) for run in runs]
        *work, copy = (statistics.median(each) for each in zip(*per_run, strict=True))
    print(f"one process  prompt {prompt:9.1f} tok/s  decode {1 / step:7.2f} tok/s")
    beside = step - sum(work)
    with tempfile.TemporaryDirectory() as folder:
        out, wrapper = Path(folder) / "notes.json", Path(folder) / "python"
        mode = "copies" if options.copies else "kernels"
        command = shlex.join([sys.executable, "-P", str(Path(__file__).resolve()), "serve", str(out), mode])
        # The daemon's command is: python -P -m luce shard --fds ...
        wrapper.write_text(f'#!/bin/sh\nshift 3\nexec {command} "$@"\n')
        wrapper.chmod(0o700)
        settings = {"target_shard_ipc_bin": (("", wrapper),), "shard_transport": options.transport}
        with opened(options.model, options.devices, options.prompt, context, settings) as backend:
            ours: Notes = {}
            last = backend.shards[-1]
            assert isinstance(last, RemoteShard)
            # Of several calls for a step only the first one does something.
            noted(ours, last, "_announce", "announcing", "announced")
            # RemoteDevice waits for requests too.
            arrived = "", "there", lambda device, event: not isinstance(event, Request)
            noted(ours, RemoteDevice, "wait_for", *arrived)
            release = last._release

            def notified() -> None:
                waiting = last._announced is not None
                release()
                if waiting:
                    ours.setdefault("notified", []).append(time.monotonic())

            last._release = notified  # type: ignore[method-assign]
            output = Request.output

            def read(request: Any) -> Any:
                request.wait()
                ours.setdefault("seen", []).append(time.monotonic())
                result = output(request)
                ours.setdefault("read", []).append(time.monotonic())
                return result

            Request.output = read  # type: ignore[method-assign, assignment]
            remote_prompt, remote_step, remote_tokens = measured(backend, options, ours, our_totals)
        theirs = json.loads(out.read_text())
    by_run = [parts(ours, theirs, per_step(our_totals, run, steps), steps, (runs[-1] - run) * steps) for run in runs]
    found = sorted(by_run, key=boundary)[len(runs) // 2]
    print(
        f"a daemon     prompt {remote_prompt:9.1f} tok/s  decode {1 / remote_step:7.2f} tok/s  "
        f"(prompt {remote_prompt / prompt:.3f}, decode {step / remote_step:.3f} of one process; "
        f"tokens {'equal' if tokens == remote_tokens else 'DIFFER'})"
    )
    for name, seconds in found.items():
        print(f"{name:45}{1e6 * seconds:10.1f} us")
    lines = {
        "the boundary, sum of the parts": boundary(found),
        **{f"one process: work of shard {number}": seconds for number, seconds in enumerate(work)},
        "one process: copy between the devices": copy,
        "one process: step beside its work": beside,
        "a daemon: step beside its work": remote_step - found["(first shard's work)"] - found["(daemon's work)"],
        "a daemon: step longer than in one process": remote_step - step,
    }
    for name, seconds in lines.items():
        print(f"{name:45}{1e6 * seconds:10.1f} us")
    print("the boundary in each run: " + ", ".join(f"{1e6 * boundary(each):.1f}" for each in by_run))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        raise SystemExit(serve(Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
    raise SystemExit(main())
