"""Drafters in daemons give the replies and the proposals of a drafter in this process, even if the daemon dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.api import Model
from luce.draft.remote import RemoteDrafter
from luce.engine.speculate import DraftStats
from luce.errors import UsageError
from tests.support.daemons import HERE, children, interpreter, key_file, pid_of, within
from tests.support.drafts import DraftReference
from tests.support.proposals import drafter_of, recorded
from tests.support.reference import Reference
from tools.listening_daemon import listener

FIT = DraftReference("qwen35-a-draft-fit-F32")
MTP = Reference("qwen35-b-Q4_K_M")
SETTINGS: dict[str, Any] = {"max_ctx": 512, "parallel": 2, "chunk": 32, "verify_width": 6, "shard_start_timeout": 60.0}
DAEMON = {"draft_ipc_bin": str(HERE)}
#: target, --draft
KINDS: dict[str, tuple[Reference, str]] = {
    "dflash": (FIT.target, str(FIT.path)),
    "mtp": (MTP, "mtp"),
    "model": (FIT.target, str(Reference("qwen35-a-Q8_0").path)),
}


def replies(model: Model, reference: Reference) -> list[list[int]]:
    """Greedy and sampled replies to two prompts at once."""
    prompts = [reference.expected[f"prompt_{key}"].tolist() for key in ("17", "long")]
    found = []
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        running = [model.generate(ids, max_tokens=16, ignore_eos=True, **sampling) for ids in prompts]
        found += [[token.id for token in generation] for generation in running]
    assert model.engine.wait_idle(30)
    return found


def drafted(model: Model) -> DraftStats:
    stats = model.engine.stats().draft
    assert stats is not None
    return stats


def proposals(model: Model, reference: Reference) -> list[tuple[int, list[int]]]:
    """The proposals during one reply: length of the text, tokens."""
    prompt = reference.expected["prompt_long"].tolist()
    with recorded(model) as found:
        list(model.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True))
    return found


@cache
def local(kind: str) -> tuple[list[tuple[int, list[int]]], list[list[int]]]:
    """Proposals and replies with the drafter in this process."""
    with loaded(kind) as model:
        return proposals(model, KINDS[kind][0]), replies(model, KINDS[kind][0])


def remote(model: Model) -> RemoteDrafter:
    """The drafter of a model, which is in a daemon."""
    drafter = drafter_of(model)
    assert isinstance(drafter, RemoteDrafter)
    return drafter


def pid(model: Model) -> int:
    """The daemon."""
    return pid_of(remote(model).device)


@contextmanager
def loaded(kind: str, **settings: Any) -> Iterator[Model]:
    reference, draft = KINDS[kind]
    settings = {"target_devices": "cpu:0", **SETTINGS, **settings}
    with luce.load(reference.path, draft=draft, **settings) as model:
        yield model


PLACES: dict[str, dict[str, Any]] = {
    "by interpreter": {**DAEMON, "draft_device": "cpu:3"},
    "request-scoped": {**DAEMON, "draft_residency": "request-scoped"},
    "beside a shard's daemon": {
        "target_devices": "cpu:0,cpu:1",
        "target_shard_ipc_bin": f"cpu={HERE}",
        "isolate_shards": True,
        "draft_device": "cpu:1",
    },
}


@pytest.mark.parametrize(
    ("kind", "place"),
    [*((kind, "by interpreter") for kind in KINDS), *(("dflash", place) for place in list(PLACES)[1:])],
)
def test_proposals_are_those_of_a_local_drafter(kind: str, place: str) -> None:
    with loaded(kind, **PLACES[place]) as model:
        assert (proposals(model, KINDS[kind][0]), replies(model, KINDS[kind][0])) == local(kind)
        stats = drafted(model)
    assert stats.state == "on" and stats.facts["daemon"] == "ready"
    assert stats.facts["device"] == PLACES[place].get("draft_device", "cpu:0")
    assert stats.facts["block"] == {"dflash": 7, "mtp": 4, "model": 8}[kind]


def test_over_a_network(tmp_path: Path) -> None:
    key = key_file(tmp_path / "key")
    with listener(FIT.target.path, key, draft=FIT.path) as (port, _):
        device = f"tcp://127.0.0.1:{port}/cpu:0"
        with loaded("dflash", draft_device=device, shard_key_file=str(key)) as model:
            assert (proposals(model, FIT.target), replies(model, FIT.target)) == local("dflash")
            stats = drafted(model)
            assert within(60, lambda: set(model.memory()) == {"cpu:0", device})
            (state,) = model.daemons()
            assert (state.shard, state.device, state.up, state.restarts) == ("draft", device, True, 0)
            assert min(state.moved.values()) > 0
    assert stats.facts["device"] == device


def test_replies_go_on_without_a_dead_daemon_and_are_drafted_again() -> None:
    prompt = FIT.expected["prompt_17"].tolist()
    sampling: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with loaded("dflash", **DAEMON) as model:
        first = [token.id for token in model.generate(prompt, **sampling)]
        running = model.generate(prompt, **sampling)
        begun = [next(running).id for _ in range(5)]
        os.kill(pid(model), signal.SIGKILL)
        assert begun + [token.id for token in running] == first
        assert within(60, lambda: remote(model).describe()["daemon"] == "ready")
        before = drafted(model)
        assert [token.id for token in model.generate(prompt, **sampling)] == first
        after = drafted(model)
    assert after.state == "on" and after.accepted > before.accepted


def test_a_daemon_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = FIT.expected["prompt_17"].tolist()
    sampling: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    monkeypatch.setattr("luce.ipc.supervisor.RESTARTS", 0)
    with loaded("dflash", **DAEMON) as model:
        first = [token.id for token in model.generate(prompt, **sampling)]
        os.kill(pid(model), signal.SIGKILL)
        for _ in range(4):
            assert [token.id for token in model.generate(prompt, **sampling)] == first
        stats = drafted(model)
    assert stats.state.startswith("unavailable: draft on cpu:0: the daemon is lost") and "SIGKILL" in stats.state


def bad(path: Path, text: str) -> Path:
    """An interpreter whose daemons run the code `text` first, in which `session` is luce.draft.daemon."""
    start = "import luce.draft.daemon as session\nfrom luce.errors import OutOfMemoryError\n"
    return interpreter(path, start + text + "from luce.cli.main import main\nsys.exit(main(sys.argv[4:]))\n")


BAD = {
    # code that changes the drafter, the state in the end, and whether tokens were proposed
    "lies": (
        "session.DraftSession.propose = lambda self, message: session.Proposed(\n"
        "    tuple(session.np.array([1 << 20], session.np.int32) for _ in message.wanted),\n"
        "    tuple(session.np.ones(1) for _ in message.wanted),\n"
        "    tuple(session.np.empty(0, session.np.int32) for _ in message.wanted))\n",
        "unavailable: draft on cpu:0: the daemon is lost: it proposed an id outside the vocabulary",
        False,
    ),
    "another answer": (
        "session.DraftSession.propose = lambda self, message: session.Done()\n",
        "unavailable: draft on cpu:0: the daemon is lost: it sent Done instead of Proposed",
        False,
    ),
    "errors": (
        "def fails(self, message): raise ValueError('no more')\nsession.DraftSession.propose = fails\n",
        "disabled: draft on cpu:0: ValueError: no more",
        False,
    ),
    "no memory at first": (
        "end, count = session.LoadedHead, iter(range(9))\n"
        "def tight(*given):\n"
        "    if next(count) < 2: raise OutOfMemoryError('cpu:0: 9 bytes asked')\n"
        "    return end(*given)\n"
        "session.LoadedHead = tight\n",
        "on",
        True,
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_drafters_change_no_reply(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, state, proposed = BAD[case]
    monkeypatch.setattr("luce.ipc.supervisor.RESTARTS", 0)
    expected = FIT.target.expected["greedy_17"][:16].tolist()
    with loaded("dflash", draft_ipc_bin=str(bad(tmp_path / "python", text))) as model:
        for _ in range(4):
            prompt = FIT.expected["prompt_17"].tolist()
            assert [t.id for t in model.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True)] == expected
        assert model.engine.wait_idle(30)
        stats = drafted(model)
    assert stats.state.startswith(state) and (stats.proposed > 0) == proposed


def test_replies_go_on_without_a_daemon_that_does_not_start(tmp_path: Path) -> None:
    path = interpreter(tmp_path / "python", "sys.exit('no CuPy here')\n")
    with loaded("dflash", draft_ipc_bin=str(path)) as model:
        assert within(60, lambda: not children())
        prompt = FIT.expected["prompt_17"].tolist()
        reply = [token.id for token in model.generate(prompt, max_tokens=16, temperature=0, ignore_eos=True)]
        assert reply == FIT.target.expected["greedy_17"][:16].tolist()
        assert re.fullmatch("refused: draft on cpu:0: .* no CuPy here.*", drafted(model).state)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--draft-ipc-bin .*/nothing: "):
        luce.load(FIT.target.path, draft=str(FIT.path), max_ctx=256, draft_ipc_bin=str(tmp_path / "nothing"))
