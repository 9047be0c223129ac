#!/usr/bin/env python3
"""Checks predictions of the planner where they can be checked without a GPU.

    tools/check_predictions.py random --count 600 --seed 20261125    the search against a brute force
    tools/check_predictions.py simulated MODEL                       pipelines of simulated devices, in real time
    tools/check_predictions.py rivals MODEL [--cpu]                  what is chosen against placements by free memory
    tools/check_predictions.py links MODEL                           links to `luce shard`, slowed and delayed

`simulated` runs random placements of a model on 2, 3 and 4 simulated devices, which take the time that is predicted
for layers, through the backend that serves: its threads, links and pieces. Of the file it reads the header alone. It
prints predicted and measured times of a decoding step and of a prompt, and which of five placements have another order
than predicted although their values differ by 10 %.

`rivals` runs the placement that each goal gets, and the one by free memory, on random machines of simulated devices.
With `--cpu` it does so on two devices of this machine's CPU, in turn: the machine must be idle.

`links` measures the link to a daemon on loopback behind a relay that delays each direction, and, as root, in a network
namespace with 100 Mbit/s in each direction. It prints what the placement is with each delay. A relay is later than it
was asked to be: how late says an echo behind another one, before and after. Without a delay the link takes longer than
the echo, for TLS and the daemon, and so it may with each delay.

Exit code 1 if a figure is off by more than 10 % (a latency by 0.3 ms more), if a placement or an order differs, or if a
chosen placement takes more than 3 % longer than the one by free memory.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from luce import __version__
from luce.backend.fastest_placement import Goal, fastest_placement, placement_problem
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.measured_devices import ModelOnDevices, measured
from luce.backend.placement import plan_shards
from luce.backend.serving_options import ServingOptions
from luce.gguf.reader import open_gguf
from luce.ipc.lifecycle import Open
from luce.ipc.supervisor import Supervisor, Timeouts
from luce.ipc.tcp import Connection, open_key_file
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.prediction import value_of
from luce.planner.problem import HeadWork, LayerWork, Load, ModelWork, Objective, Problem
from luce.planner.search import best_placement
from luce.profiles.profile import LinkProfile
from luce.remote.messages import Response
from luce.remote.probe import probe_link
from luce.runtime.device import DeviceName
from luce.runtime.open import open_device
from luce.runtime.step import PAGE
from tools.delaying_relay import delayed, echo, ping
from tools.listening_daemon import listener, make_key_file
from tools.planner_cases import BruteForce, problem_of, random_case
from tools.simulated_pipelines import TimedSteps, compare, random_layers, random_machine, ranked, rivals, scarce
from tools.slow_cable import THERE, namespace

# What placements are to make fast, and the share by which one may take longer than the one by free memory.
_GOALS: tuple[Objective, ...] = ("decode", "prompt", "balanced")
_WORSE = 0.03
# Of the comparison on this CPU: tokens of the prompt, decoding steps behind it, and rounds.
_CPU_PROMPT, _CPU_STEPS, _ROUNDS = 512, 32, 5
#: bytes per second of 100 Mbit/s, less the headers of Ethernet, IP, TCP (1448 of 1514 bytes) and of TLS (22 of 16 KiB)
_PAYLOAD = 1e8 / 8 * 1448 / 1514 * 16384 / 16406


def check_random(count: int, seed: int) -> bool:
    """Whether the search finds what a brute force finds, in random cases."""
    rng, fitting, wrong = random.Random(seed), 0, 0
    for _ in range(count):
        case = random_case(rng)
        expected, found = BruteForce(case).best(), best_placement(problem_of(case))
        fitting += expected is not None
        if expected is None or found is None:
            good = expected is None and found is None
        else:
            placement = [[s.device, s.layers.start, s.layers.stop - 1, s.offloaded] for s in found.placement]
            good = placement == expected[1] and abs(found.prediction.value / expected[0] - 1) < 1e-6
        wrong += not good
    print(f"seed {seed}: {count} cases, {fitting} of which fit; {wrong} differ")
    return not wrong


def check_simulated(model: Path, seed: int) -> bool:
    """Whether pipelines of simulated devices take the predicted time, and rank as predicted."""
    rng, good = random.Random(seed), True
    # That the devices compute nothing, for each load.
    logging.getLogger("luce.backend.simulated_shard").setLevel(logging.ERROR)
    print("devices  decode: predicted  measured      prompt: predicted  measured")
    with open_gguf(model) as file:
        spec = read_spec(Source(str(model), file.metadata, file.tensors))
        for devices in (2, 3, 4):
            machine = random_machine(rng, file, spec, devices)
            found = []
            for layers in random_layers(rng, file, spec, machine, 5):
                found.append(compared := compare(file, spec, machine, layers))
                prediction = compared.prediction
                good &= compared.off <= 0.1
                print(
                    f"{devices:7}  {prediction.decode * 1e3:15.1f} ms {compared.decode * 1e3:6.1f} ms  "
                    f"{prediction.prompt * 1e3:15.0f} ms {compared.prompt * 1e3:6.0f} ms  {compared.off:6.1%} off",
                    flush=True,
                )
            wrong, pairs = ranked(found)
            good &= not wrong
            print(
                f"{pairs} pairs differ by 10 %, {len(wrong)} of them in another order than predicted", *wrong, sep="\n"
            )
    return good


def check_rivals(model: Path, seed: int) -> bool:
    """Whether no goal's placement takes 3 % longer than the one by free memory, on simulated devices in real time."""
    rng, good = random.Random(seed), True
    logging.getLogger("luce.backend.simulated_shard").setLevel(logging.ERROR)
    with open_gguf(model) as file:
        spec = read_spec(Source(str(model), file.metadata, file.tensors))
        for devices in (2, 3, 4):
            whole = random_machine(rng, file, spec, devices)
            for name, machine in (("ample", whole), ("scarce", scarce(rng, file, spec, whole))):
                for goal in _GOALS:
                    both = rivals(file, spec, machine, goal)
                    good &= (worse_by := both.worse_by(goal)) <= _WORSE
                    used = len(both.fastest.prediction.shards)
                    print(f"{devices} devices, {name} memory, {goal:8}: {used} used, {worse_by:+.1%}", flush=True)
    return good


def check_cpu_rivals(model: Path) -> bool:
    """The same on two devices of this CPU, in turn."""
    good = True
    with open_gguf(model) as file, contextlib.ExitStack() as opened:
        spec = read_spec(Source(str(model), file.metadata, file.tensors))
        devices = [open_device(DeviceName("cpu", number), "packed") for number in range(2)]
        options = ServingOptions(context=_CPU_PROMPT + _CPU_STEPS + PAGE)
        on_devices = ModelOnDevices(file, spec, devices, options)
        known = measured(on_devices)
        placements: dict[str, tuple[range, ...]] = {}
        by_memory = tuple(shard.layers for shard in plan_shards(file, spec, devices, options))
        problems = {goal: placement_problem(on_devices, known, Goal(goal, prompt=_CPU_PROMPT)) for goal in _GOALS}
        timed: dict[tuple[range, ...], TimedSteps] = {}
        for goal, problem in problems.items():
            fastest = fastest_placement(on_devices, problem, known)
            assert fastest is not None
            placements[goal] = fastest.layers
        for layers in {by_memory, *placements.values()}:
            backend = LayerSplitBackend(file, spec, devices[: len(layers)], replace(options, layers=layers))
            timed[layers] = TimedSteps(opened.enter_context(contextlib.closing(backend)), _CPU_PROMPT)
            timed[layers].prompt()
        rounds = [{at: (own.decode(_CPU_STEPS), own.prompt()) for at, own in timed.items()} for _ in range(_ROUNDS)]
        for goal, problem in problems.items():
            values = [[value_of(problem, *each[at]) for at in (placements[goal], by_memory)] for each in rounds]
            worse_by = statistics.median(own / other for own, other in values) - 1
            good &= worse_by <= _WORSE
            print(f"this CPU, {goal:8}: {len(placements[goal])} of {len(devices)} devices used, {worse_by:+.1%}")
    return good


def link_to(address: tuple[str, int], key: Path) -> LinkProfile:
    """The link to a `luce shard`."""
    connect = partial(Connection, address=f"{address[0]}:{address[1]}", tls=open_key_file(key, "key", server=False))
    supervisor = Supervisor(
        "daemon", connect, Open(__version__, ("cpu:0",), "info", 0, "packed"), Timeouts(60, 60), Response
    )
    try:
        supervisor.hello()
        return supervisor.before_load(probe_link).result(120)
    finally:
        supervisor.close()


def machines_used(latency: float, bandwidth: float) -> int:
    """Machines that decode: a slow one here holds the model, a fast one behind the link holds half of it."""
    layer = LayerWork(bytes=10**9, macs=0, launches=0, kv=0, attention=0)
    work = ModelWork(5120, (20_480,) * 10, 0, HeadWork(0, 0, 0), (layer,) * 10)
    here = DeviceFigures("cuda:0", "here", False, 1 << 40, 2e11, ((1, 1e15),), 0.0, 0.0, LinkFigures(0.0, 1e12))
    way = LinkFigures(latency, bandwidth)
    far = replace(here, name="far", machine="far", free=6 * 10**9, read=2e12, way=way, daemon="far")
    found = best_placement(Problem(work, Load(1, 64, 64), (here, far), {}, "decode"))
    assert found is not None
    return len(found.placement)


@contextlib.contextmanager
def daemon_in(name: str, model: Path, key: Path) -> Iterator[tuple[str, int]]:
    """The address of a `luce shard` in a network namespace."""
    inside = ["ip", "netns", "exec", name, sys.executable, "-m", "luce"]
    command = [*inside, "shard", str(model), "--listen", f"{THERE}:0", "--key-file", str(key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield THERE, int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


def check_links(model: Path) -> bool:
    """Whether links have the delays and the bandwidth that they were given, and placements follow."""
    good = True
    with tempfile.TemporaryDirectory() as folder:
        key = make_key_file(Path(folder) / "key.pem")
        with listener(model, key) as (port, _), echo() as plain:
            bare = None
            for delay in (0.0, 0.005, 0.02, 0.005, 0.0):
                with delayed(("127.0.0.1", port), delay) as address, delayed(plain, delay) as beside:
                    before = ping(beside)
                    link = link_to(address, key)
                    truth = (before + ping(beside)) / 2
                bare = link.latency - truth if bare is None else bare
                off = link.latency - truth - bare
                used = machines_used(link.latency, link.bandwidth)
                right = abs(off) <= 0.1 * truth + 3e-4 and used == machines_used(truth + bare, link.bandwidth)
                right &= delay == 0.005 or used == (1 if delay else 2)
                good &= right
                print(
                    f"delay {delay * 1e3:4.0f} ms: the relay takes {truth * 1e3:6.3f} ms, latency "
                    f"{link.latency * 1e3:6.3f} ms, {off * 1e3:+.3f} ms beside both; {used} machines"
                    f"{'' if right else ': wrong'}",
                    flush=True,
                )
        if os.geteuid():
            print("the limit of 100 Mbit/s needs root: not checked")
            return good
        with namespace("100mbit") as name, daemon_in(name, model, key) as address:
            link = link_to(address, key)
        off = link.bandwidth / _PAYLOAD - 1
        good &= abs(off) <= 0.1
        figures = f"{link.bandwidth / 1e6:.2f} MB/s, {off:+.1%} of {_PAYLOAD / 1e6:.2f}"
        print(f"100 Mbit/s: {figures}; latency {link.latency * 1e3:.3f} ms")
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    cases = verbs.add_parser("random")
    cases.add_argument("--count", type=int, default=600)
    cases.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    simulated = verbs.add_parser("simulated")
    simulated.add_argument("model", type=Path)
    simulated.add_argument("--seed", type=int, default=1)
    both = verbs.add_parser("rivals")
    both.add_argument("model", type=Path)
    both.add_argument("--seed", type=int, default=1)
    both.add_argument("--cpu", action="store_true")
    verbs.add_parser("links").add_argument("model", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.verb == "random":
        good = check_random(chosen.count, chosen.seed)
    elif chosen.verb == "simulated":
        good = check_simulated(chosen.model, chosen.seed)
    elif chosen.verb == "rivals":
        good = check_cpu_rivals(chosen.model) if chosen.cpu else check_rivals(chosen.model, chosen.seed)
    else:
        good = check_links(chosen.model)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
