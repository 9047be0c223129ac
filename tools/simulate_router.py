"""What routing policies do to agents' traffic: hit rate, waiting time and queues, by number of replicas.

Agents hold conversations: a system prompt with tools, which all agents of a kind share, then turns that each add a
message or a tool's result and get a reply. Prompts repeat everything before. Sizes are drawn as sessions of coding
agents have them: log-normal, with a median of 900 tokens a turn and 220 a reply, 20 turns, 4 s between two turns. A
replica reads its queue in order, has `--parallel` slots and a prefix cache that gives up what was used longest ago; it
reports to the router each half second, as luce.ray does. The router is the one that runs: luce.ray.routing_state.

    python -m tools.simulate_router --replicas 2,8,32 --seconds 600
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from luce.kvcache.block_keys import TOKENS
from luce.ray.routing_state import RoutingState

REPORT_SECONDS = 0.5
KINDS, SYSTEM_TOKENS = 4, 12_000
TURNS, TURN_MEDIAN, REPLY_MEDIAN, PAUSE = 20, 900, 220, 4.0


@dataclass(frozen=True)
class Speeds:
    """A replica: seconds a token of a prompt and of a reply, slots, and tokens that its prefix cache holds."""

    prefill: float = 1 / 2500
    decode: float = 1 / 40
    parallel: int = 8
    cache: int = 400_000


@dataclass
class Request:
    """One turn: the blocks of its prompt, and the tokens of its reply."""

    session: int
    keys: list[bytes]
    #: keys of the prompt with its reply, which the replica has cached behind it
    after: list[bytes]
    reply: int
    #: blocks that some replica has computed before
    repeated: int
    #: the requests of the conversation behind this one
    turns: Iterator[Request]
    arrived: float = 0.0
    cached: int = 0


class Session:
    """One agent's conversation, as requests."""

    def __init__(self, number: int, draw: random.Random) -> None:
        self.number, self._draw, self._turns = number, draw, max(1, round(draw.expovariate(1 / TURNS)))
        self._system = draw.randrange(KINDS)
        self._length = SYSTEM_TOKENS
        self._known = SYSTEM_TOKENS // TOKENS

    def turns(self) -> Iterator[Request]:
        """The requests, each to be sent behind the reply of the one before."""
        requests = self._requests(lambda: requests)
        return requests

    def _requests(self, rest: Callable[[], Iterator[Request]]) -> Iterator[Request]:
        for _ in range(self._turns):
            self._length += round(self._draw.lognormvariate(0, 0.9) * TURN_MEDIAN)
            keys, reply = self._keys(), max(1, round(self._draw.lognormvariate(0, 0.8) * REPLY_MEDIAN))
            self._length += reply
            yield Request(self.number, keys, self._keys(), reply, self._known, rest())
            self._known = self._length // TOKENS

    def _keys(self) -> list[bytes]:
        shared = SYSTEM_TOKENS // TOKENS
        own = range(shared, self._length // TOKENS)
        return [b"%d-%d" % (self._system, n) for n in range(shared)] + [b"s%d-%d" % (self.number, n) for n in own]


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
    """Replicas under the traffic of `rate` new sessions a second, routed by the policy `policy`."""

    def __init__(self, policy: str, replicas: int, rate: float, speeds: Speeds, seed: int) -> None:
        self._draw = random.Random(seed)
        self._replicas = {f"r{number}": Replica(f"r{number}", speeds) for number in range(replicas)}
        self._names = list(self._replicas)
        self._state = RoutingState()
        self._state.keep(self._names)
        self._policy = policy
        self._choose: Policy = getattr(self, f"_{policy}")
        self._choices = random.Random(seed + 1)
        self._round = itertools.cycle(self._names)
        self._rate = rate
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self.outcome = Outcome()

    def run(self, seconds: float) -> Outcome:
        """Let sessions begin for so many seconds, and end after as many again at most."""
        begin, number = 0.0, 0
        while (begin := begin + self._draw.expovariate(self._rate)) < seconds:
            turns = Session(number, random.Random(self._draw.random())).turns()
            self._at(begin, lambda now, turns=turns: self._next(turns, now))  # type: ignore[misc]
            number += 1
        self._at(REPORT_SECONDS, self._report)
        while self._events and self._events[0][0] < 2 * seconds:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self.outcome

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
        self._state.began(replica.name, request.keys if self._policy == "prefix" else ())
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
        self._state.ended(replica.name, request.keys if self._policy == "prefix" else (), now)
        self._at(now + self._draw.expovariate(1 / PAUSE), lambda now: self._next(request.turns, now))
        self._start(replica, now)

    def _report(self, now: float) -> None:
        loads = [replica.load for replica in self._replicas.values()]
        if sum(loads):
            self.outcome.skew.append(max(loads) / statistics.fmean(loads))
            self.outcome.waiting.append(statistics.fmean(len(each.waiting) for each in self._replicas.values()))
        for replica in self._replicas.values():
            if self._policy == "prefix":
                self._state.apply(replica.name, replica.report(), now)
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

    def _prefix(self, request: Request, now: float) -> str:
        return self._state.ranked(request.keys, now)[0]


POLICIES = {
    "random": "any replica",
    "round_robin": "one after the other",
    "two_choices": "the less loaded of two (Ray Serve's default)",
    "session": "by the hash of the conversation",
    "prefix": "by cached prefix and waiting time (luce.ray)",
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
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(" | ".join(["", *COLUMNS, ""]).strip())
    print("|".join(["", *["---"] * len(COLUMNS), ""]))
    for replicas in map(int, options.replicas.split(",")):
        for policy in options.policies.split(","):
            simulation = Simulation(policy, replicas, options.rate * replicas, Speeds(), options.seed)
            row = Row(replicas, policy, simulation.run(options.seconds))
            print(" | ".join(["", *row.cells(), ""]).strip(), flush=True)


if __name__ == "__main__":
    main()
