"""What routing policies do to agents' traffic: hit rate, waiting time and queues, by number of replicas.

Agents hold conversations: a system prompt with tools, which all agents of a kind share, then turns that each add a
message or a tool's result and get a reply. Prompts repeat everything before. Sizes are drawn as sessions of coding
agents have them: log-normal, with a median of 900 tokens a turn and 220 a reply, 20 turns, 4 s between two turns; or
all comes from a recording (tools.router_traffic), whose traffic is that of `--recorded-replicas` replicas: fewer get a
part of its conversations, more get them several times.

A replica reads its queue in order, has 8 slots and a prefix cache that gives up what was used longest ago; it reports
to the router each half second, as luce.ray does. The router is the one that runs: luce.ray.routing_state.

    python -m tools.simulate_router --replicas 2,8,32 --seconds 600
    python -m tools.simulate_router --replicas 2,8,32 --seconds 600 --trace conversation_trace.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from luce.kvcache.block_keys import TOKENS
from luce.ray.routing_state import SPREAD_KEY, RoutingState
from tools.router_traffic import Arrival, Recording, Request, drawn

REPORT_SECONDS = 0.5
PAUSE = 4.0
#: most replicas of a cell, which has a router of its own
CELL = 32


@dataclass(frozen=True)
class Speeds:
    """A replica: seconds a token of a prompt and of a reply, slots, and tokens that its prefix cache holds."""

    prefill: float = 1 / 2500
    decode: float = 1 / 40
    parallel: int = 8
    cache: int = 400_000


class Replica:
    """A server: a queue, slots, and a prefix cache."""

    def __init__(self, name: str, speeds: Speeds) -> None:
        self.name, self._speeds = name, speeds
        self.waiting: deque[Request] = deque()
        self.running = 0
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.reported: set[bytes] = set()
        self.changed: set[bytes] = set()
        self.sequence = 0
        self.computed = [0, 0.0]
        self.replied = [0, 0.0]

    @property
    def load(self) -> int:
        """Requests here."""
        return self.running + len(self.waiting)

    def start(self) -> tuple[Request, float, float] | None:
        """The next request, with the seconds to its first token and to its end; None if nothing can start."""
        if not self.waiting or self.running == self._speeds.parallel:
            return None
        request = self.waiting.popleft()
        self.running += 1
        request.cached = next((n for n, key in enumerate(request.keys) if key not in self.cache), len(request.keys))
        tokens = (len(request.keys) - request.cached) * TOKENS
        prefill, decode = tokens * self._speeds.prefill, request.reply * self._speeds.decode
        self.computed = [self.computed[0] + tokens, self.computed[1] + prefill]
        self.replied = [self.replied[0] + 1, self.replied[1] + prefill + decode]
        return request, prefill, prefill + decode

    def finish(self, request: Request) -> None:
        """A request has ended: its prompt and its reply are cached."""
        self.running -= 1
        for key in reversed(request.after):
            if key not in self.cache:
                self.changed.add(key)
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) * TOKENS > self._speeds.cache:
            self.changed.add(self.cache.popitem(last=False)[0])

    def report(self) -> dict[str, object]:
        """What the replica tells the router."""
        added = {key for key in self.changed if key in self.cache and key not in self.reported}
        removed = {key for key in self.changed if key not in self.cache and key in self.reported}
        since, self.sequence = (self.sequence if self.sequence else -1), self.sequence + 1
        self.reported = (self.reported | added) - removed if added or removed else self.reported
        self.changed = set()
        return {
            "life": "one",
            "since": since,
            "sequence": self.sequence,
            "added": added,
            "removed": removed,
            "running": self.running,
            "waiting": len(self.waiting),
            "parallel": self._speeds.parallel,
            "prefill_seconds": self.computed[1] / self.computed[0] if self.computed[0] else 0.0,
            "reply_seconds": self.replied[1] / self.replied[0] if self.replied[0] else 0.0,
        }


def even_cells(names: Sequence[str]) -> list[Sequence[str]]:
    """As few cells of at most CELL replicas as hold them all, whose sizes differ by one at most: the hash sends each of
    them the same traffic, and a small one would never catch up."""
    cells = -(-len(names) // CELL)
    return [names[number * len(names) // cells : (number + 1) * len(names) // cells] for number in range(cells)]


Policy = Callable[[Request, float], str]


@dataclass
class Outcome:
    """Of all requests of a run."""

    repeated: int = 0
    cached: int = 0
    #: seconds to the first token
    first: list[float] = field(default_factory=list)
    #: at each report, the most requests of a replica by the mean
    skew: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    #: seconds of a decision
    decisions: list[float] = field(default_factory=list)


class Simulation:
    """Replicas, whose requests are routed by the policy `policy`."""

    def __init__(self, policy: str, replicas: int, speeds: Speeds, seed: int) -> None:
        self._draw = random.Random(seed)
        self._replicas = {f"r{number}": Replica(f"r{number}", speeds) for number in range(replicas)}
        self._names = list(self._replicas)
        self._cell_names: list[Sequence[str]] = [self._names]
        if policy == "cells":
            self._cell_names = even_cells(self._names)
        self._states = [RoutingState() for _ in self._cell_names]
        #: by replica, the state of its router
        self._state_of: dict[str, RoutingState] = {}
        for state, names in zip(self._states, self._cell_names, strict=True):
            state.keep(names)
            self._state_of.update(dict.fromkeys(names, state))
        self._by_prefix = policy in ("prefix", "cells")
        self._choose: Policy = getattr(self, f"_{policy}")
        self._choices = random.Random(seed + 1)
        self._round = itertools.cycle(self._names)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self.outcome = Outcome()

    def run(self, traffic: Iterable[Arrival], seconds: float) -> Outcome:
        """Let the traffic of so many seconds arrive, and end after as many again at most."""
        self._arrive(iter(traffic))
        self._at(REPORT_SECONDS, self._report)
        while self._events and self._events[0][0] < 2 * seconds:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self.outcome

    def _arrive(self, traffic: Iterator[Arrival]) -> None:
        """Wait for the next arrival, and for the one behind it then."""
        if (arrival := next(traffic, None)) is not None:
            when, turns = arrival

            def arrive(now: float) -> None:
                self._next(turns, now)
                self._arrive(traffic)

            self._at(when, arrive)

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def _next(self, turns: Iterator[Request], now: float) -> None:
        request = next(turns, None)
        if request is None:
            return
        request.arrived = now
        began = time.perf_counter()
        replica = self._replicas[self._choose(request, now)]
        self.outcome.decisions.append(time.perf_counter() - began)
        self._state_of[replica.name].began(replica.name, request.keys if self._by_prefix else ())
        replica.waiting.append(request)
        self._start(replica, now)

    def _start(self, replica: Replica, now: float) -> None:
        while (started := replica.start()) is not None:
            request, first, whole = started
            self.outcome.first.append(now - request.arrived + first)
            self.outcome.repeated += request.repeated
            self.outcome.cached += min(request.cached, request.repeated)
            self._at(now + whole, lambda now, request=request: self._finish(replica, request, now))  # type: ignore[misc]

    def _finish(self, replica: Replica, request: Request, now: float) -> None:
        replica.finish(request)
        self._state_of[replica.name].ended(replica.name, request.keys if self._by_prefix else (), now)
        self._at(now + self._draw.expovariate(1 / PAUSE), lambda now: self._next(request.turns, now))
        self._start(replica, now)

    def _report(self, now: float) -> None:
        loads = [replica.load for replica in self._replicas.values()]
        if sum(loads):
            self.outcome.skew.append(max(loads) / statistics.fmean(loads))
            self.outcome.waiting.append(statistics.fmean(len(each.waiting) for each in self._replicas.values()))
        for replica in self._replicas.values():
            if self._by_prefix:
                self._state_of[replica.name].apply(replica.name, replica.report(), now)
        if self._events:
            self._at(now + REPORT_SECONDS, self._report)

    def _random(self, request: Request, now: float) -> str:
        return self._choices.choice(self._names)

    def _round_robin(self, request: Request, now: float) -> str:
        return next(self._round)

    def _two_choices(self, request: Request, now: float) -> str:
        few = self._choices.sample(self._names, min(2, len(self._names)))
        return min(few, key=lambda name: self._replicas[name].load)

    def _session(self, request: Request, now: float) -> str:
        return self._names[random.Random(request.session).randrange(len(self._names))]

    def _rendezvous(self, request: Request, now: float) -> str:
        key = request.keys[min(SPREAD_KEY, len(request.keys)) - 1] if request.keys else b""
        return max(self._names, key=lambda name: hashlib.sha256(key + name.encode()).digest())

    def _prefix(self, request: Request, now: float) -> str:
        return self._states[0].ranked(request.keys, now)[0]

    def _cells(self, request: Request, now: float) -> str:
        return random.Random(request.session).choice(self._states).ranked(request.keys, now)[0]


POLICIES = {
    "random": "any replica",
    "round_robin": "one after the other",
    "two_choices": "the less loaded of two (Ray Serve's default)",
    "session": "by the hash of the conversation",
    "rendezvous": "by the hash of the prompt's first 256 tokens",
    "prefix": "by cached prefix and waiting time (luce.ray)",
    "cells": f"by the hash of the conversation to cells of up to {CELL} replicas, in each as luce.ray",
}


class Row(NamedTuple):
    """A line of the table."""

    replicas: int
    policy: str
    outcome: Outcome

    def cells(self) -> list[str]:
        """As text."""
        found = self.outcome
        ordered = sorted(found.first)
        return [
            str(self.replicas),
            self.policy,
            f"{found.cached / max(1, found.repeated):.0%}",
            f"{statistics.median(ordered):.2f}",
            f"{ordered[int(0.95 * len(ordered))]:.2f}",
            f"{statistics.fmean(found.waiting):.2f}",
            f"{statistics.fmean(found.skew):.1f}",
            f"{1e3 * statistics.fmean(found.decisions):.3f}",
            str(len(ordered)),
        ]


COLUMNS = [
    "replicas",
    "policy",
    "hit rate",
    "first token s",
    "95% s",
    "waiting",
    "most / mean",
    "decision ms",
    "requests",
]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="2,8,32", help="numbers of replicas")
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--seconds", type=float, default=600.0, help="time in which sessions begin")
    parser.add_argument("--rate", type=float, default=0.055, help="new sessions a second for each replica")
    parser.add_argument("--trace", type=Path, help="recorded requests instead of drawn ones: a file of JSON lines")
    parser.add_argument("--trace-block", type=int, default=512, help="tokens of a block of the recording")
    parser.add_argument("--recorded-replicas", type=int, default=8, help="how many replicas the recording is for")
    parser.add_argument("--cache", type=int, default=Speeds().cache, help="tokens that a replica's prefix cache holds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    recording = Recording(options.trace, options.trace_block) if options.trace else None
    print(" | ".join(["", *COLUMNS, ""]).strip())
    print("|".join(["", *["---"] * len(COLUMNS), ""]))
    for replicas in map(int, options.replicas.split(",")):
        for policy in options.policies.split(","):
            simulation = Simulation(policy, replicas, Speeds(cache=options.cache), options.seed)
            if recording is None:
                draw = random.Random(options.seed)
                traffic = drawn(options.rate * replicas, options.seconds, draw)
            else:
                traffic = recording.arrivals(replicas / options.recorded_replicas, options.seconds)
            row = Row(replicas, policy, simulation.run(traffic, options.seconds))
            print(" | ".join(["", *row.cells(), ""]).strip(), flush=True)


if __name__ == "__main__":
    main()
