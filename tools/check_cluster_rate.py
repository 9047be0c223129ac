#!/usr/bin/env python3
"""Compares the speed of a server whose second half is on a member behind a slow link with its prediction, and with the
speed of one process. Needs root, two cores, and the programs ip, tc and taskset.

    tools/check_cluster_rate.py MODEL.gguf [--links 100mbit 1gbit:1] [--prompt 1024] [--tokens 48] [--rounds 3]

The member is in a network namespace, behind a cable of 100 Mbit/s in each direction, then of 1 Gbit/s with a relay that
delays each direction by 1 ms. Server and member have a core each; the one process has all layers on one core. The
replies of both take turns; figures are medians. A step of the model should take 10 ms or more, of which 2 pass on the
delayed link.

Of a step and of a prompt it prints what was predicted and measured, and of these what the devices worked and what was
beside it: link, messages, threads. How fast a core computes varies from minute to minute; `by one process` is the ratio
as a share of that of one process in the same rounds, so that what the link adds remains.

Exit code 1 if a ratio is off by more than 20 % of that of one process, or if decoding over the delayed link has less
than 0.90 of one process although its step takes 10 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from luce.cluster.join_token import decode_token, encode_token
from luce.config.directories import user_cache_directory
from luce.ipc.tcp import format_address
from tools.delaying_relay import delayed
from tools.slow_cable import HERE, namespace

_ROOT = Path(__file__).resolve().parent.parent
#: links: bits per second as tc writes them, and milliseconds of delay in each direction
LINKS = ("100mbit", "1gbit:1")
#: least share of one process's decoding rate, where a step takes so many seconds; and largest error of a prediction
LEAST, LONG, OFF = 0.90, 10e-3, 0.20
#: seconds until a server is ready
_READY = 300.0


class Luce:
    """`luce` on one core, with a directory of its own `name` in a folder, and with the cache of that folder: the cores
    are alike, and are measured once."""

    def __init__(
        self, folder: Path, name: str, core: int, words: Sequence[str], *, stdin: str = "", inside: str = ""
    ) -> None:
        self._log = folder / f"{name}.log"
        cache = {"CACHE_DIRECTORY": str(folder / "cache")}
        environment = {**os.environ, "XDG_DATA_HOME": str(folder / name), **cache}
        command = ["ip", "netns", "exec", inside] if inside else []
        command += ["taskset", "-c", str(core), sys.executable, "-P", "-m", "luce", *words]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        assert self._process.stdin is not None
        with self._process.stdin as given:
            given.write(stdin.encode())

    def found(self, pattern: str) -> str:
        """The first group of a pattern in what it has written."""
        end = time.monotonic() + _READY
        while time.monotonic() < end and self._process.poll() is None:
            if match := re.search(pattern, self._log.read_text()):
                return match[1]
            time.sleep(0.1)
        raise SystemExit(f"no {pattern!r} in:\n{self._log.read_text()}")

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Times:
    """Seconds of a decoding step and of a prompt: in all, and of the shards' devices, added up."""

    step: float
    step_work: float
    prompt: float
    prompt_work: float


class Server:
    """A server that is ready."""

    def __init__(self, process: Luce) -> None:
        self._port = process.found(r"listening url=http://127\.0\.0\.1:(\d+)")
        process.found(r"(ready) model=")

    def plan(self) -> dict[str, Any]:
        """What is predicted (luce.backend.prediction_facts)."""
        found: dict[str, Any] = json.loads(self._get("/props"))["runtime"]["plan"]
        return found

    def reply(self, prompt: int, tokens: int, seed: int) -> Times:
        """What a reply takes."""
        body = {"prompt": [seed + 5, *[3 + seed] * (prompt - 1)], "n_predict": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        before, between, timings = self._worked(), None, None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    between = between or self._worked()
                    timings = json.loads(line[6:]).get("timings", timings)
        assert between is not None and timings is not None
        after = self._worked()
        steps = [(last[1] - first[1]) / max(1, last[0] - first[0]) for first, last in zip(between, after, strict=True)]
        reading = sum(last[1] - first[1] for first, last in zip(before, between, strict=True))
        step = timings["predicted_ms"] / timings["predicted_n"] / 1e3
        return Times(step, sum(steps), timings["prompt_ms"] / 1e3, reading)

    def _worked(self) -> list[tuple[float, float]]:
        """Steps and pieces of prompts so far, and their seconds, by shard."""
        text = self._get("/metrics")
        counts, sums = (
            [float(value) for value in re.findall(rf"^luce_shard_seconds_{name}\{{.*\}} (\S+)$", text, re.MULTILINE)]
            for name in ("count", "sum")
        )
        return list(zip(counts, sums, strict=True))

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}") as answer:
            return str(answer.read().decode())


def predicted(plan: dict[str, Any]) -> Times:
    """What a plan says of a step and of a prompt."""
    stages = plan["stages"]
    work = sum(stage["piece_s"] for stage in stages) * plan["pieces"]
    return Times(1 / plan["decode_tok_s"], sum(stage["decode_s"] for stage in stages), plan["prompt_s"], work)


def median(times: Sequence[Times]) -> Times:
    """The medians of each figure."""
    return Times(*(statistics.median(getattr(each, name) for each in times) for name in Times.__annotations__))


def settings(prompt: int, tokens: int) -> list[str]:
    """Those of a plan for such prompts."""
    return ["--devices", "cpu:0", "--max-ctx", str(prompt + tokens + 64), "--optimize-prompt", str(prompt)]


#: settings of a server that reads each prompt anew
SERVING = ("--port", "0", "--cache-ram", "0", "--kv-cache-dir", "off")


@contextlib.contextmanager
def cluster(
    folder: Path, cores: Sequence[int], model: Path, flags: Sequence[str], link: tuple[str, float]
) -> Iterator[Server]:
    """A server with a member behind a link."""
    rate, delay = link
    models = folder / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(model.resolve())
    words = ["serve", str(model), "--cluster", "home", "--cluster-listen", f"{HERE}:0", "--cluster-min", "1"]
    with contextlib.ExitStack() as opened:
        inside = opened.enter_context(namespace(rate))
        server = opened.enter_context(
            contextlib.closing(
                Luce(folder, "server", cores[0], [*words, *SERVING, *flags, "--optimize", "prompt", "--pin-devices"])
            )
        )
        text = server.found(r"luce join (\S+)")
        if delay:
            token = decode_token(text)
            host, _, port = token.addresses[0].rpartition(":")
            way = opened.enter_context(delayed((host, int(port)), delay))
            text = encode_token(
                token.cluster, (format_address(*way),), token.pin, (token.id, token.secret), token.expires
            )
        joining = ["join", "-", "--model-dir", str(models), "--devices", "cpu:0"]
        opened.enter_context(
            contextlib.closing(Luce(folder, "member", cores[1], joining, stdin=text + "\n", inside=inside))
        )
        yield Server(server)


def run_planned(folder: Path, core: int, model: Path, flags: Sequence[str]) -> dict[str, Any]:
    """What is predicted of one process, once the core has been measured."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "luce", "plan", str(model), *flags]
    environment = {**os.environ, "CACHE_DIRECTORY": str(folder / "cache")}
    made = subprocess.run(
        [*command, "--measure", "--json"],
        cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(made.stdout)["placement"]
    return found


def check(folder: Path, model: Path, link: tuple[str, float], chosen: argparse.Namespace) -> bool:
    """Whether a server over a link is as fast as it must be."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    flags = settings(chosen.prompt, chosen.tokens)
    planned = run_planned(folder, cores[0], model, flags)
    with contextlib.closing(Luce(folder, "one", cores[0], ["serve", str(model), *SERVING, *flags])) as process:
        one = Server(process)
        with cluster(folder, cores, model, flags, link) as both:
            found: dict[str, list[Times]] = {"one": [], "both": []}
            for server in (one, both):
                # Warms up.
                server.reply(min(512, chosen.prompt), 8, 0)
            for number in range(1, chosen.rounds + 1):
                for name, server in (("one", one), ("both", both)):
                    found[name].append(server.reply(chosen.prompt, chosen.tokens, number))
            return show(link, (planned, median(found["one"])), (both.plan(), median(found["both"])), found)


def show(
    link: tuple[str, float],
    one: tuple[dict[str, Any], Times],
    both: tuple[dict[str, Any], Times],
    found: dict[str, list[Times]],
) -> bool:
    """Print a table, and return whether its figures are as they must be."""
    (way,) = (profile["way"] for profile in both[0]["profiles"].values() if profile["way"] is not None)
    bandwidth, latency = way["bytes_per_second"] / 1e6, 1e3 * way["latency_s"]
    print(
        f"\n{link[0]}/s, {1e3 * link[1]:g} ms each way; by the planner {bandwidth:.2f} MB/s, {latency:.2f} ms each way"
    )
    print(f"{'ms':34}predicted  measured     ratio  by one process")
    good = True
    for phase in ("step", "prompt"):
        ratios = []
        for name, (plan, real) in (("one process", one), ("over the link", both)):
            said = predicted(plan)
            whole, real_whole = getattr(said, phase), getattr(real, phase)
            work, real_work = getattr(said, f"{phase}_work"), getattr(real, f"{phase}_work")
            ratios.append(real_whole / whole)
            print(line(f"{phase}, {name}", whole, real_whole) + f"{ratios[-1] / ratios[0]:16.2f}")
            print(line("  work of the devices, added up", work, real_work))
            if phase == "step":
                print(line("  beside it", whole - work, real_whole - real_work))
        good &= abs(ratios[1] / ratios[0] - 1) <= OFF
    shares = [alone.step / over.step for alone, over in zip(found["one"], found["both"], strict=True)]
    share = statistics.median(shares)
    print(f"decoding: {share:.3f} of one process (rounds: {', '.join(f'{each:.3f}' for each in shares)})", flush=True)
    return good and (not link[1] or one[1].step < LONG or share >= LEAST)


def line(name: str, predicted: float, measured: float) -> str:
    """A line of the table, of seconds."""
    ratio = f"{measured / predicted:10.2f}" if predicted > 1e-6 else f"{'':10}"
    return f"{name:34}{1e3 * predicted:9.2f}{1e3 * measured:10.2f}{ratio}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure over each link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    about = "bits per second as tc writes them, and milliseconds of delay each way"
    parser.add_argument("--links", nargs="+", default=LINKS, metavar="RATE[:DELAY]", help=about)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens; a multiple of 512, the rows of a piece")
    parser.add_argument("--tokens", type=int, default=48, help="of a reply")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    good = True
    for text in chosen.links:
        rate, _, delay = text.partition(":")
        link = rate, float(delay or 0) / 1e3
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # Compiled kernels stay those of the user: compiling them takes minutes.
            kernels = user_cache_directory() / "cpu"
            kernels.mkdir(parents=True, exist_ok=True)
            (folder / "cache").mkdir()
            (folder / "cache" / "cpu").symlink_to(kernels)
            good &= check(folder, chosen.model.resolve(), link, chosen)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
