"""A greedy reply of 400 tokens over three members, one of which is killed, frozen or unplugged at each stage: its
tokens are those of an undisturbed one, none twice. CL-A5 of the acceptance tests. How long it pauses is printed, not
judged: what else runs here decides about it too. A pause has three parts: until the loss is known, which may take 3 s
behind SIGKILL and 15 s otherwise, until the model is loaded again, and until prompt and reply so far are read again.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_processes import REFERENCE, Process, Start, ask, members_of, serve, starting, stream
from tests.support.cluster_streams import Timed, replan, settle, states
from tests.support.daemons import within
from tests.support.network_namespaces import ADDRESS, Machine, machines

NAMES, TOKENS = ("box", "den", "nook"), 400
#: a prompt of several pages
PROMPT = [3 + number % 200 for number in range(300)]
#: seconds until a loss is known, as the acceptance test says
KNOWN = {"kill": 3.0, "freeze": 15.0, "pull": 15.0}


class Host:
    """A machine with its member, which can be disturbed and mended."""

    def __init__(self, start: Any, name: str, machine: Machine, flags: list[str]) -> None:
        self.start, self.name, self.machine, self.flags = start, name, machine, flags
        self.lives = list[Process]()

    def join(self, *words: str) -> None:
        self.lives.append(self.start(self.name, "join", *words, *self.flags, prefix=self.machine.prefix))

    def disturb(self, how: str) -> None:
        if how == "pull":
            self.machine.pull()
        else:
            self.lives[-1].child.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def mend(self, how: str) -> None:
        if how == "pull":
            self.machine.push()
        elif how == "freeze":
            self.lives[-1].child.send_signal(signal.SIGCONT)
        else:
            self.lives[-1].ended()
            self.join("--cluster", "home")


class Reply:
    """A streamed reply on a thread."""

    def __init__(self, port: int) -> None:
        self.ids, self.error = Timed(), ""

        def run() -> None:
            self.error = stream(port, TOKENS, self.ids, PROMPT)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def begun(self, tokens: int) -> bool:
        """Whether it comes to have so many tokens."""
        return within(60, lambda: len(self.ids) >= tokens or not self.thread.is_alive())

    def wait(self) -> list[int]:
        """Its tokens, once it has ended."""
        self.thread.join(300)
        assert self.error == "" and not self.thread.is_alive(), self.error
        return list(self.ids)


class Moments:
    """When the lines of a log came, until the end of a `with` block."""

    def __init__(self, log: list[str]) -> None:
        self._log, self._times, self._ending = log, list[float](), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Moments:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(0.005):
            self._times += [time.monotonic()] * (len(self._log) - len(self._times))

    def of(self, texts: tuple[str, ...], begin: float, end: float) -> list[float]:
        """When lines with one of these texts came, in this time."""
        lines = zip(self._times, self._log, strict=False)
        return [at for at, line in lines if begin <= at <= end and any(text in line for text in texts)]

    def parts(self, ids: Timed) -> tuple[float, float, float]:
        """The parts of a pause: until the loss was known, until the layers were there, until the next token."""
        began = ids.ended - ids.pause
        known = self.of((" member lost ",), began, ids.ended)[:1] or [began]
        loaded = self.of((" plan taken ", " replies go on "), began, ids.ended)[-1:] or known
        first, second, third = (b - a for a, b in itertools.pairwise([began, *known, *loaded, ids.ended]))
        return first, second, third


def disturbed(port: int, start: Start, stage: str, disturb: Callable[[], None]) -> Reply:
    """A reply that is disturbed in a stage."""
    if stage == "prompt":
        # Its first steps meet what is not there any more.
        disturb()
        return Reply(port)
    reply = Reply(port)
    assert reply.begun(60)
    if stage in ("save", "load"):
        replan(start)
    if stage == "load":
        assert within(30, lambda: "loading" in states(start)), states(start)
    disturb()
    return reply


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_reply_goes_on_whatever_happens_to_a_member_in_any_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    flags = ["--model-dir", str(models), "--devices", "cpu:0"]
    with (
        machines(len(NAMES)) as made,
        starting(tmp_path) as start,
        capsys.disabled(),
        contextlib.ExitStack() as opened,
    ):
        more = ["--cluster-min", "3", "--cluster-on-loss", "replan", "--max-ctx", "1024"]
        server, port = serve(start, *more, listen=f"{ADDRESS}:0")
        moments = opened.enter_context(Moments(server.log))
        hosts = [Host(start, name, machine, flags) for name, machine in zip(NAMES, made, strict=True)]
        hosts[0].join(server.found(r"luce join (\S+)"))
        for host in hosts[1:]:
            token = start("server", "cluster", "token")
            assert token.ended() == 0
            host.join(re.findall(r"luce join (\S+)", "".join(token.out))[0])
        assert within(200, lambda: ask(port, "/health")[0] == 200), server.log
        reply = Reply(port)
        expected = reply.wait()
        assert len(expected) == TOKENS
        moved = disturbed(port, start, "save", lambda: None)
        assert moved.wait() == expected
        print(f"\nundisturbed: pause {reply.ids.pause:.2f} s; while the model moves {moved.ids.pause:.2f} s")
        for number, (stage, how) in enumerate([(s, h) for s in ("prompt", "decode", "save", "load") for h in KNOWN]):
            assert settle(start, port, len(hosts)), (stage, how, server.log[-30:])
            host = hosts[number % len(hosts)]
            losses = sum(member["losses"] for member in members_of(start).values())
            reply = disturbed(port, start, stage, lambda host=host, how=how: host.disturb(how))  # type: ignore[misc]
            assert reply.wait() == expected, (stage, how, server.log[-30:])
            known, load, prompt = moments.parts(reply.ids)
            parts = f"{known:.2f} until it is known (at most {KNOWN[how]:g}), load {load:.2f}, prompt {prompt:.2f}"
            print(f"{how} at {stage}: pause {reply.ids.pause:.2f} s: {parts}", flush=True)
            assert within(60, lambda: sum(m["losses"] for m in members_of(start).values()) > losses), (stage, how)  # noqa: B023
            host.mend(how)
        for process in (*(host.lives[-1] for host in hosts), server):
            process.child.send_signal(signal.SIGTERM)
            assert process.ended() == 0, process.log[-30:]
