"""Replies that cannot move with their model fail once `--cluster-drain` is over, and the server serves others."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from luce.cluster import wire
from tests.support.cluster_processes import REFERENCE, ask, command, member_of, serve, serving_member, starting, stream
from tests.support.daemons import within
from tests.support.drafts import DraftReference

DRAFT = DraftReference("qwen35-a-draft-fit-F32")
#: tokens of replies that end undisturbed, and of one that takes much longer than a signal or a command
TOKENS, LONG = 150, 1500


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with both model files."""
    folder = tmp_path / "models"
    folder.mkdir()
    for number, path in enumerate((REFERENCE.path, DRAFT.target.path)):
        (folder / f"{number}.gguf").symlink_to(path)
    return folder


class Reply:
    """A greedy reply that streams on a thread."""

    def __init__(self, port: int, tokens: int, prompt: list[int]) -> None:
        self.ids: list[int] = []
        self.error = "unfinished"

        def run() -> None:
            self.error = stream(port, tokens, self.ids, prompt)

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert within(60, lambda: len(self.ids) >= 20), self.error

    def wait(self) -> str:
        """Its error."""
        self.thread.join(300)
        return self.error


def test_a_reply_that_cannot_move_fails_and_says_why(tmp_path: Path, models: Path) -> None:
    with starting(tmp_path) as start:
        server, port = serve(start, "--kvflash", "256", "--max-ctx", "2048")
        flags = ["--model-dir", str(models), "--devices", "cpu:0"]
        box = start("box", "join", server.found(r"luce join (\S+)"), *flags)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log)
        prompt = REFERENCE.expected["prompt_17"].tolist()
        expected: list[int] = []
        assert stream(port, TOKENS, expected, prompt) == ""
        reply = Reply(port, LONG, prompt)
        assert isinstance(command(start, wire.AskReplan()), wire.Done)
        error = reply.wait()
        assert "moving" in error and "0 s (--cluster-drain) to end: --kvflash keeps it from moving" in error, error
        known = min(len(reply.ids), TOKENS)
        assert reply.ids[:known] == expected[:known] and len(reply.ids) < LONG
        assert within(120, lambda: ask(port, "/health")[0] == 200 and member_of(start)["layers"]), server.log[-30:]
        again: list[int] = []
        assert stream(port, TOKENS, again, prompt) == "" and again == expected
        assert serving_member(start)["losses"] == 0


def test_a_drafted_reply_whose_member_stays_away_fails_and_names_it(tmp_path: Path, models: Path) -> None:
    target, draft = DRAFT.target, str(DRAFT.path)
    with starting(tmp_path) as start:
        more = ["--draft", draft, "--verify-width", "6", "--max-ctx", "2048"]
        more += ["--cluster-on-loss", "replan", "--cluster-resume", "86400"]
        server, port = serve(start, *more, model=target.path)
        flags = ["--model-dir", str(models), "--devices", "cpu:0"]
        box = start("box", "join", server.found(r"luce join (\S+)"), *flags)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log)
        prompt = target.expected["prompt_17"].tolist()
        expected: list[int] = []
        assert stream(port, TOKENS, expected, prompt) == "" and len(expected) == TOKENS
        name = member_of(start)["name"]
        reply = Reply(port, LONG, prompt)
        box.child.send_signal(signal.SIGKILL)
        box.ended()
        error = reply.wait()
        assert f" on other machines without {name}, and this reply had" in error, error
        assert "(--cluster-drain) to end: --draft keeps it from moving" in error, error
        known = min(len(reply.ids), TOKENS)
        assert reply.ids[:known] == expected[:known] and len(reply.ids) < LONG
        # The others have the layers.
        assert within(120, lambda: ask(port, "/health")[0] == 200), server.log[-30:]
        again: list[int] = []
        assert stream(port, TOKENS, again, prompt) == "" and again == expected
        assert member_of(start)["state"] == "lost"
