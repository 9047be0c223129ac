#!/usr/bin/env python3
"""Checks predictions of the planner where they can be checked without a GPU.

    tools/check_predictions.py random --count 600 --seed 20261125    the search against a brute force
    tools/check_predictions.py simulated                             pipelines of devices that sleep, with real threads
    tools/check_predictions.py links MODEL                           links to `luce shard`, slowed and delayed

`simulated` runs random placements on 2, 3 and 4 devices that compute nothing and take the predicted time, through the
pipeline that serves: its threads, links and pieces. It prints predicted and measured times of a decoding step and of a
prompt, and whether the order of five placements by measured time is the predicted one, where they differ by 10 %.

`links` measures the link to a daemon on loopback behind a relay that delays each direction, and, as root, in a network
namespace with 100 Mbit/s in each direction. It prints what the placement is with each delay.

Exit code 1 if a figure is off by more than 10 % (a latency by 0.3 ms more), or if a placement or an order differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from luce import __version__
from luce.ipc.lifecycle import Open
from luce.ipc.supervisor import Supervisor, Timeouts
from luce.ipc.tcp import Connection, open_key_file
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.prediction import PlacedShard, Prediction, predict
from luce.planner.problem import HeadWork, LayerWork, Load, ModelWork, Problem
from luce.planner.search import best_placement
from luce.profiles.profile import LinkProfile
from luce.remote.messages import Response
from luce.remote.probe import probe_link
from luce.runtime.device import CopyStream, DeviceName, Event
from luce.runtime.host import HostDevice
from luce.shard.pipeline import Pipeline
from tools.listening_daemon import listener, make_key_file
from tools.planner_cases import BruteForce, problem_of, random_case

_HIDDEN, _LAYERS = 1024, 24
#: seconds below which a sleep is a busy wait: the system wakes a thread up to a millisecond late
_BUSY = 1e-3
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


def sleep(seconds: float) -> None:
    """Wait exactly so long."""
    end = time.perf_counter() + seconds
    if seconds > _BUSY:
        time.sleep(seconds - _BUSY)
    while time.perf_counter() < end:
        pass


class SimulatedEvent(Event):
    """An entry of a stream."""

    def __init__(self) -> None:
        self._done, self._at = threading.Event(), 0.0

    def happen(self) -> None:
        self._at = time.perf_counter()
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()

    def seconds_since(self, start: Event) -> float:
        assert isinstance(start, SimulatedEvent)
        return self._at - start._at


class SimulatedStream(CopyStream):
    """Work of a device on a thread of its own. Copies take the time of `link`."""

    def __init__(self, link: LinkFigures) -> None:
        self._link = link
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def wait_for(self, event: Event) -> None:
        self.put(event.wait)

    def copy(self, target: Any, source: Any) -> None:
        self.put(partial(sleep, self._link.seconds(source.nbytes)))

    def record(self, *, timing: bool = False) -> Event:
        event = SimulatedEvent()
        self.put(event.happen)
        return event


class SimulatedDevice(HostDevice):
    """A device that computes nothing. `link`: to the next device."""

    host = False

    def __init__(self, index: int, link: LinkFigures) -> None:
        super().__init__(index)
        self.name, self._link, self.stream = DeviceName("cuda", index), link, SimulatedStream(link)

    def record(self, *, timing: bool = False) -> Event:
        return self.stream.record()

    def wait_for(self, event: Event) -> None:
        self.stream.wait_for(event)

    def copy_stream(self) -> CopyStream:
        return SimulatedStream(self._link)

    def reaches(self, other: object) -> bool:
        return isinstance(other, SimulatedDevice)

    def synchronize(self) -> None:
        self.record().wait()


@dataclass
class SimulatedShard:
    """Layers that take their predicted time. `seconds`: by the number of rows."""

    device: SimulatedDevice
    seconds: Callable[[int], float]
    last: bool
    remote = False

    def announce(self, step: Any, activation: Any) -> None:
        pass

    def forward(self, step: Any, activation: Any) -> Any:
        self.device.stream.put(partial(sleep, self.seconds(step.rows)))
        if not self.last:
            return (np.empty((step.rows, _HIDDEN), np.float32),)
        return self.device.record().wait

    def close(self) -> None:
        pass


def simulated_problem(rng: random.Random, devices: int) -> Problem:
    """Layers on devices whose pieces take 20 to 80 ms, on links that take a few."""
    layer = LayerWork(bytes=50_000_000, macs=50_000_000, launches=0, kv=0, attention=0)
    work = ModelWork(_HIDDEN, (0, *(4 * _HIDDEN,) * (_LAYERS - 1)), 0, HeadWork(0, 0, 0), (layer,) * _LAYERS)
    figures = []
    for number in range(devices):
        speed = rng.uniform(0.7, 1.5)
        # A layer takes 1 ms for a row, and 3 ms for 512.
        rates = ((1, 1e11 * speed), (512, 17e12 * speed))
        way = LinkFigures(0.0, 1e12)
        figures.append(
            DeviceFigures(f"cuda:{number}", "here", False, 1 << 40, 50e9 * speed, rates, 0.0, 5e-4, way, workspace=0)
        )
    link = LinkFigures(rng.uniform(1e-4, 1e-3), rng.uniform(2e8, 2e9))
    links = {(a.name, b.name): link for a, b in itertools.permutations(figures, 2)}
    return Problem(work, Load(1, 4096, 4096), tuple(figures), links, "balanced", pinned=True)


def measure(problem: Problem, prediction: Prediction) -> tuple[float, float]:
    """Seconds of a decoding step and of a prompt in a pipeline of simulated devices; medians."""
    (link, *_) = problem.links.values()
    pipeline = Pipeline(peer=True)
    for number, stage in enumerate(prediction.shards):
        times = {1: stage.decode.total, prediction.rows: stage.piece.total}
        last = number == len(prediction.shards) - 1
        shard: Any = SimulatedShard(SimulatedDevice(number, link), times.__getitem__, last)
        pipeline.add(stage.shard.device, stage.shard.device, shard)
        if number:
            pipeline.link(prediction.rows * _HIDDEN)

    def step(rows: int) -> Any:
        return SimpleNamespace(rows=rows, output_rows=(0,), positions=(0,))

    def decode() -> float:
        began = time.perf_counter()
        pipeline.run(step(1))[1].wait()
        return time.perf_counter() - began

    def prompt() -> float:
        began = time.perf_counter()
        futures = [pipeline.queue(step(prediction.rows)) for _ in range(prediction.pieces)]
        futures[-1].result()[1].wait()
        return time.perf_counter() - began

    try:
        decode()
        return float(np.median([decode() for _ in range(9)])), float(np.median([prompt() for _ in range(3)]))
    finally:
        pipeline.close()


def placements(rng: random.Random, problem: Problem, count: int) -> Iterator[tuple[PlacedShard, ...]]:
    """Random boundaries."""
    for _ in range(count):
        cuts = [0, *sorted(rng.sample(range(3, _LAYERS - 2), len(problem.devices) - 1)), _LAYERS]
        yield tuple(
            PlacedShard(device.name, range(*ends))
            for device, ends in zip(problem.devices, itertools.pairwise(cuts), strict=True)
        )


def check_simulated(seed: int) -> bool:
    """Whether simulated pipelines take the predicted time, and rank as predicted."""
    rng, good = random.Random(seed), True
    print("devices  decode: predicted  measured      prompt: predicted  measured")
    for devices in (2, 3, 4):
        problem, values = simulated_problem(rng, devices), []
        for placement in placements(rng, problem, 5):
            prediction = predict(problem, placement)
            assert prediction is not None
            decode, prompt = measure(problem, prediction)
            off = max(abs(decode / prediction.decode - 1), abs(prompt / prediction.prompt - 1))
            good &= off <= 0.1
            print(
                f"{devices:7}  {prediction.decode * 1e3:15.1f} ms {decode * 1e3:6.1f} ms  "
                f"{prediction.prompt * 1e3:15.0f} ms {prompt * 1e3:6.0f} ms  {off:6.1%} off"
            )
            weights = problem.weights
            values.append((prediction.value, weights[0] * decode + weights[1] * prompt))
        for (a, measured_a), (b, measured_b) in itertools.combinations(values, 2):
            if abs(a / b - 1) > 0.1 and (a < b) != (measured_a < measured_b):
                good = False
                print(
                    f"the order differs: predicted {a:.3f} and {b:.3f}, measured {measured_a:.3f} and {measured_b:.3f}"
                )
    return good


async def relay(target: tuple[str, int], delay: float, port: asyncio.Future[int]) -> None:
    """Pass connections on to a target, each byte `delay` seconds later, in both directions."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, data = await late.get()
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                writer.write(data)
                await writer.drain()

        writing = asyncio.create_task(write())
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                late.put_nowait((time.perf_counter() + delay, data))
        await asyncio.sleep(2 * delay)
        writing.cancel()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection(*target)
        # The end of the relay cancels it, which is no error of the stream.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(pass_on(reader, far[1]), pass_on(far[0], writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port.set_result(server.sockets[0].getsockname()[1])
    await server.serve_forever()


@contextlib.contextmanager
def delayed(target: tuple[str, int], delay: float) -> Iterator[tuple[str, int]]:
    """The address of a relay to a target."""
    loop = asyncio.new_event_loop()
    port: asyncio.Future[int] = loop.create_future()
    known: queue.SimpleQueue[int] = queue.SimpleQueue()
    port.add_done_callback(lambda done: known.put(done.result()))
    task = loop.create_task(relay(target, delay, port))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        # Those of open connections.
        rest = asyncio.all_tasks(loop)
        for each in rest:
            each.cancel()
        if rest:
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield "127.0.0.1", known.get(timeout=10)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


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


def machines_used(link: LinkProfile) -> int:
    """Machines that decode: a slow one here holds the model, a fast one behind the link holds half of it."""
    layer = LayerWork(bytes=10**9, macs=0, launches=0, kv=0, attention=0)
    work = ModelWork(5120, (20_480,) * 10, 0, HeadWork(0, 0, 0), (layer,) * 10)
    here = DeviceFigures("cuda:0", "here", False, 1 << 40, 2e11, ((1, 1e15),), 0.0, 0.0, LinkFigures(0.0, 1e12))
    way = LinkFigures(link.latency, link.bandwidth)
    far = replace(here, name="far", machine="far", free=6 * 10**9, read=2e12, way=way, daemon="far")
    found = best_placement(Problem(work, Load(1, 64, 64), (here, far), {}, "decode"))
    assert found is not None
    return len(found.placement)


@contextlib.contextmanager
def namespace(rate: str) -> Iterator[str]:
    """A network namespace with a link of so many bits per second in each direction, and its address there."""
    name, near, far = "luce-check", "lucenear", "lucefar"
    inside = ["ip", "netns", "exec", name]
    shape = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "200ms"]
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name],
        ["ip", "addr", "add", "10.97.0.1/24", "dev", near],
        ["ip", "link", "set", near, "up"],
        [*inside, "ip", "addr", "add", "10.97.0.2/24", "dev", far],
        [*inside, "ip", "link", "set", far, "up"],
        ["tc", "qdisc", "add", "dev", near, *shape],
        [*inside, "tc", "qdisc", "add", "dev", far, *shape],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True)
        yield name
    finally:
        subprocess.run(["ip", "link", "del", near], check=False)
        subprocess.run(["ip", "netns", "del", name], check=False)


@contextlib.contextmanager
def daemon_in(name: str, model: Path, key: Path) -> Iterator[tuple[str, int]]:
    """The address of a `luce shard` in a network namespace."""
    inside = ["ip", "netns", "exec", name, sys.executable, "-m", "luce"]
    command = [*inside, "shard", str(model), "--listen", "10.97.0.2:0", "--key-file", str(key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield "10.97.0.2", int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.kill()


def check_links(model: Path) -> bool:
    """Whether links have the delays and the bandwidth that they were given, and placements follow."""
    good = True
    with tempfile.TemporaryDirectory() as folder:
        key = make_key_file(Path(folder) / "key.pem")
        with listener(model, key) as (port, _):
            bare = None
            for delay in (0.0, 0.005, 0.02, 0.005, 0.0):
                with delayed(("127.0.0.1", port), delay) as address:
                    link = link_to(address, key)
                bare = link.latency if bare is None else bare
                off = abs(link.latency - delay - bare)
                right = off <= 0.1 * delay + 3e-4
                used = machines_used(link)
                right &= used == (1 if delay == 0.02 else 2)
                good &= right
                latency, wrong = 1e3 * link.latency, "" if right else ": wrong"
                print(f"delay {delay * 1e3:4.0f} ms: latency {latency:7.3f} ms, {used} machines{wrong}")
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
    verbs.add_parser("simulated").add_argument("--seed", type=int, default=1)
    verbs.add_parser("links").add_argument("model", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.verb == "random":
        good = check_random(chosen.count, chosen.seed)
    else:
        good = check_simulated(chosen.seed) if chosen.verb == "simulated" else check_links(chosen.model)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
