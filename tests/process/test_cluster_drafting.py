"""Replies with drafting, KVFlash and grammars, while a member of the cluster is lost, and while the model moves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from luce.cluster import wire
from tests.support.cluster_processes import Process, ask, command, member_of, serve, serving_member, starting, stream
from tests.support.daemons import within
from tests.support.drafts import DraftReference
from tests.support.reference import Reference

FIT, MTP, PLAIN = DraftReference("qwen35-a-draft-fit-F32"), Reference("qwen35-b-Q4_K_M"), Reference("qwen3-a-F32")
#: the model and the settings
KINDS: dict[str, tuple[Reference, Sequence[str]]] = {
    "ngram": (PLAIN, ("--draft", "ngram")),
    "dflash": (FIT.target, ("--draft", str(FIT.path), "--verify-width", "6")),
    "mtp": (MTP, ("--draft", "mtp", "--verify-width", "4")),
    "kvflash": (PLAIN, ("--kvflash", "256", "--max-ctx", "512")),
}
TOKENS = 150
GRAMMAR = "root ::= [a-z0-9 ]{600}"
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_k": 40, "seed": 7},
    {"grammar": GRAMMAR},
    {"grammar": GRAMMAR, "temperature": 0.9, "seed": 7},
)


class Replies:
    """One streamed reply for each of FIELDS, all at once."""

    def __init__(self, port: int, prompt: list[int]) -> None:
        self.ids: list[list[int]] = [[] for _ in FIELDS]
        self.errors = ["unfinished"] * len(FIELDS)

        def run(number: int) -> None:
            try:
                self.errors[number] = stream(port, TOKENS, self.ids[number], prompt, **FIELDS[number])
            except Exception as error:
                self.errors[number] = repr(error)

        self.threads = [threading.Thread(target=run, args=(number,)) for number in range(len(FIELDS))]
        for thread in self.threads:
            thread.start()

    def wait_begun(self, tokens: int) -> None:
        assert within(60, lambda: all(len(ids) >= tokens for ids in self.ids)), (self.errors, self.ids)

    def wait(self) -> None:
        for thread in self.threads:
            thread.join(300)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.repeated] if kind == "mtp" else []) for kind in KINDS]
)
def test_replies_go_on_with_their_tokens(kind: str, tmp_path: Path) -> None:
    reference, settings = KINDS[kind]
    prompt = reference.expected["prompt_17"].tolist()
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(reference.path)
    flags = ["--model-dir", str(models), "--devices", "cpu:0"]
    with starting(tmp_path) as start:
        # Replies that cannot move end before the model is loaded anew.
        drain = "0" if kind == "ngram" else "300"
        server, port = serve(start, "--parallel", "4", "--cluster-drain", drain, *settings, model=reference.path)
        box: Process = start("box", "join", server.found(r"luce join (\S+)"), *flags)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log)

        def undisturbed() -> list[list[int]]:
            replies = Replies(port, prompt)
            replies.wait()
            assert replies.errors == [""] * len(FIELDS)
            return replies.ids

        expected = undisturbed()
        assert all(len(ids) == TOKENS for ids in expected)

        # The member is killed, and comes back.
        replies = Replies(port, prompt)
        replies.wait_begun(20)
        box.child.send_signal(signal.SIGKILL)
        box.ended()
        box = start("box", "join", "--cluster", "home", *flags)
        replies.wait()
        if kind == "kvflash":
            # Which pages are resident depends on all earlier steps: they fail, and say why.
            assert all(name in error for error in replies.errors for name in ("member://", "cpu:0")), replies.errors
            assert all(ids == full[: len(ids)] for ids, full in zip(replies.ids, expected, strict=True))
        else:
            assert replies.errors == [""] * len(FIELDS), server.log[-30:]
            assert replies.ids == expected
        assert serving_member(start)["losses"] == 1

        # The model moves: behind the replies, or with them.
        replies = Replies(port, prompt)
        replies.wait_begun(20)
        assert isinstance(command(start, wire.AskReplan()), wire.Done)
        replies.wait()
        assert replies.errors == [""] * len(FIELDS), server.log[-30:]
        assert replies.ids == expected
        why = "--kvflash" if kind == "kvflash" else "--draft"
        # Those that have not ended before it.
        server.found("replies go on count=[1-4] reason=.the model has moved" if kind == "ngram" else f"{why} keeps it")
        assert within(120, lambda: ask(port, "/health")[0] == 200), server.log[-30:]

        # The member leaves while replies run.
        replies = Replies(port, prompt)
        replies.wait_begun(20)
        box.child.send_signal(signal.SIGTERM)
        replies.wait()
        assert replies.errors == [""] * len(FIELDS), server.log[-30:]
        assert replies.ids == expected
        assert box.ended() == 0 and "cut off" not in "".join(box.log)
        assert within(60, lambda: member_of(start)["state"] == "gone")
        assert within(120, lambda: ask(port, "/health")[0] == 200), server.log[-30:]
        assert undisturbed() == expected
