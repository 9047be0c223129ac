"""A drafter in a daemon: text updates, refused requests, and responses that the server refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from luce.config.settings import Config
from luce.draft.daemon import DraftSession
from luce.draft.drafter import Draftable
from luce.draft.messages import DraftLoaded, Idle, LoadDraft, Propose, Proposed, TextUpdate
from luce.draft.remote import check_proposals
from luce.engine.draft_tree import well_formed
from luce.errors import BackendError, LuceError, ModelError, UsageError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.ipc.channel import ProtocolError
from luce.remote import open as opening
from luce.remote.messages import Done, Forward
from luce.runtime.device import Device
from luce.runtime.draws import Draw
from luce.runtime.host import HostDevice
from luce.runtime.open import named
from tests.support.drafts import DraftReference

FIT = DraftReference("qwen35-a-draft-fit-F32")
WIDTH, VOCAB = 3 * 64, 768


def digest(path: Path) -> str:
    with open_gguf(path) as file:
        return fingerprint(file)


def load_of(**fields: Any) -> LoadDraft:
    target, draft = FIT.target.path, FIT.path
    load = LoadDraft(str(target), digest(target), str(draft), digest(draft), 2, 128, 0, True)
    return msgspec.structs.replace(load, **fields)


@pytest.fixture
def session() -> Iterator[DraftSession]:
    with ExitStack() as stack:
        yield DraftSession(load_of(), HostDevice(), None, None, stack)


def update(
    slot: int = 0, at: int = 0, tokens: int = 5, begin: int = 0, rows: int = 4, fresh: bool = True
) -> TextUpdate:
    return TextUpdate(slot, fresh, at, np.arange(at, at + tokens, dtype=np.int32), begin, rows)


def propose(
    *parts: TextUpdate, wanted: tuple[tuple[int, int, int], ...] = ((0, 7, 0),), rows: int | None = None
) -> Propose:
    count = sum(part.rows for part in parts) if rows is None else rows
    return Propose(parts, np.full((max(0, count), WIDTH), 0x3F80, np.uint16), wanted, (None,) * len(wanted))


def tokens(session: DraftSession, message: Propose) -> list[list[int]]:
    reply = session.handle(message)
    assert isinstance(reply, Proposed)
    return [ids.tolist() for ids in reply.tokens]


def test_a_text_in_several_updates(session: DraftSession) -> None:
    assert session.loaded() == DraftLoaded("dflash", 7, (0, 2, 5))
    (whole,) = tokens(session, propose(update(1, tokens=9, rows=8), wanted=((1, 7, 0),)))
    assert len(whole) == 7
    session.handle(propose(update(), wanted=()))
    assert tokens(session, propose(update(at=5, tokens=4, begin=4, rows=4, fresh=False))) == [whole]
    # Rows that were not accepted are overwritten; another text begins in the slot.
    session.handle(propose(update(at=9, tokens=3, begin=8, rows=3, fresh=False), wanted=()))
    session.handle(propose(update(tokens=7, rows=6), wanted=()))
    assert tokens(session, propose(update(at=7, tokens=2, begin=4, rows=4, fresh=False), wanted=((0, 3, 0),))) == [
        whole[:3]
    ]


def test_rows_that_are_missing_are_no_error(session: DraftSession) -> None:
    assert tokens(session, propose(update(rows=0))) == [[]]
    assert len(tokens(session, propose(update(at=5, tokens=1, begin=4, rows=1, fresh=False)))[0]) == 7


def test_memory_goes_and_comes_back() -> None:
    with ExitStack() as stack:
        session = DraftSession(load_of(keep=False), HostDevice(), None, None, stack)
        assert session.ring is None or session.drafter.describe()["loaded"] == "no"
        whole = tokens(session, propose(update()))
        assert session.ring is not None
        assert session.handle(Idle()) == Done() and session.ring is None
        with pytest.raises(BackendError):
            session.handle(propose(update(at=5, tokens=1, rows=0, fresh=False)))
        assert tokens(session, propose(update())) == whole


BAD = {
    "a slot that does not exist": propose(update(2), wanted=()),
    "a slot twice": propose(update(), update(), wanted=()),
    "features of nothing": propose(update(), rows=3),
    "more rows than text": propose(update(rows=6), wanted=()),
    "fewer than no rows": propose(update(rows=-1), wanted=(), rows=0),
    "a position before the first": propose(update(begin=-1), wanted=()),
    "a text that is not known": propose(update(1, at=5, fresh=False), wanted=()),
    "a hole in the text": propose(update(at=1), wanted=()),
    "an id outside the vocabulary": propose(TextUpdate(0, True, 0, np.array([VOCAB], np.int32), 0, 0), wanted=()),
    "no text": propose(update(tokens=0, rows=0), wanted=()),
    "a table of ids": propose(TextUpdate(0, True, 0, np.zeros((1, 2), np.int32), 0, 0), wanted=()),
    "an unknown text wanted": propose(update(), wanted=((1, 3, 0),)),
    "wanted twice": propose(update(), wanted=((0, 3, 0), (0, 3, 0))),
    "no tokens wanted": propose(update(), wanted=((0, 0, 0),)),
    "a tree of less than no depth": propose(update(), wanted=((0, 3, -1),)),
    "another message": Forward(),
    "fewer draws than texts": msgspec.structs.replace(propose(update()), draws=()),
    **{
        f"a draw of {name} {value}": msgspec.structs.replace(
            propose(update()), draws=(replace(Draw(1, 1.0), **{name: value}),)
        )
        for name, value in (
            ("seed", -1),
            ("seed", 1 << 64),
            ("temperature", 0.0),
            ("temperature", math.inf),
            ("temperature", math.nan),
            ("top_k", -1),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("min_p", -0.1),
            ("min_p", 2.0),
        )
    },
}


def test_a_text_that_is_drawn(session: DraftSession) -> None:
    greedy = tokens(session, propose(update()))
    message = msgspec.structs.replace(propose(update()), draws=(Draw(1, 30.0, top_k=40),))
    drawn = tokens(session, message)
    assert len(drawn[0]) == 7 and drawn != greedy and drawn == tokens(session, message)
    assert tokens(session, propose(update())) == greedy


@pytest.mark.parametrize("message", BAD.values(), ids=BAD)
def test_messages_that_are_refused(message: Any, session: DraftSession) -> None:
    whole = tokens(session, propose(update()))
    with pytest.raises(BackendError):
        session.handle(message)
    assert tokens(session, propose(update())) == whole


@pytest.mark.parametrize(
    ("fields", "error", "why"),
    [
        ({"slots": 0}, BackendError, "do not fit"),
        ({"context": -1}, BackendError, "do not fit"),
        ({"window": -1}, BackendError, "do not fit"),
        ({"fingerprint": "0" * 32}, ModelError, "qwen35-a-F32.gguf: the daemon's file is not the server's"),
        ({"draft_fingerprint": ""}, ModelError, "draft-fit-F32.gguf: the daemon's file is not the server's"),
        ({"draft": "nowhere.gguf"}, ModelError, "nowhere.gguf"),
        ({"draft": "mtp"}, ModelError, "has no layer for multi-token prediction"),
    ],
)
def test_loads_that_are_refused(fields: dict[str, Any], error: type[LuceError], why: str) -> None:
    with ExitStack() as stack, pytest.raises(error, match=why):
        DraftSession(load_of(**fields), HostDevice(), None, None, stack)


WANTED = [Draftable(0, np.arange(5, dtype=np.int32), 2)]
TREE = [Draftable(0, np.arange(5, dtype=np.int32), 2, 1)]


def proposed(ids: Any, probabilities: Any, parents: Any = ()) -> Proposed:
    return Proposed((np.array(ids, np.int32),), (np.array(probabilities, np.float64),), (np.array(parents, np.int32),))


@pytest.mark.parametrize("reply", [proposed([], []), proposed([0, VOCAB - 1], [0.0, 1.0]), proposed([3], [])])
def test_responses(reply: Proposed) -> None:
    check_proposals(reply, WANTED, VOCAB)
    check_proposals(reply, TREE, VOCAB)


def test_responses_with_trees() -> None:
    check_proposals(proposed([3, 4], [1, 1], [-1, -1]), TREE, VOCAB)
    for parents in ([-1], [[-1, -1]], [-1, -1, -1]):
        with pytest.raises(ProtocolError, match="parents"):
            check_proposals(proposed([3, 4], [1, 1], parents), TREE, VOCAB)


def test_a_tree_of_a_text(session: DraftSession) -> None:
    reply = session.handle(propose(update(1, tokens=9, rows=8), wanted=((1, 12, 3),)))
    assert isinstance(reply, Proposed)
    (found,), (parents,) = reply.tokens, reply.parents
    assert len(found) == len(parents) == 12 and well_formed(parents.tolist(), found.tolist(), 3)


@pytest.mark.parametrize(
    "reply",
    [
        Proposed((), (), ()),
        Proposed((np.zeros(1, np.int32),), (), ()),
        proposed([1, 2], [1, 1], [-1, 0]),
        proposed([1, 2, 3], [1, 1, 1]),
        proposed([[1]], [[1]]),
        proposed([1, 2], [1]),
        proposed([VOCAB], [1]),
        proposed([-1], [1]),
        proposed([1], [1.5]),
        proposed([1], [float("nan")]),
    ],
)
def test_invalid_responses(reply: Proposed) -> None:
    with pytest.raises(ProtocolError):
        check_proposals(reply, WANTED, VOCAB)


#: --draft-ipc-bin, --target-shard-ipc-bin, devices of the model in daemons, vendor of CuPy here, device, interpreter
PLACES = [
    ("/d", {}, (), "cuda", "cuda:0", "/d"),
    ("/d", {"cpu": "/c"}, (), "cuda", "cpu:0", "/d"),
    ("", {}, (), "cuda", "cuda:0", None),
    ("", {"hip": "/h"}, (), "cuda", "hip:1", "/h"),
    ("", {"": "/p"}, (), "cuda", "hip:0", "/p"),
    ("", {"": "/p"}, (), None, "hip:0", None),
    ("", {"": "/p"}, ("cuda:1",), "cuda", "cuda:1", "/p"),
    ("", {"": "/p"}, ("cuda:1",), "cuda", "cuda:0", None),
]


@pytest.mark.parametrize(("own", "given", "daemons", "vendor", "device", "expected"), PLACES)
def test_the_interpreter_of_a_draft(
    own: str,
    given: dict[str, str],
    daemons: tuple[str, ...],
    vendor: str | None,
    device: str,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "cupy_vendor", lambda: vendor)
    paths = tuple((kind, Path(path)) for kind, path in given.items())
    config = Config(draft_ipc_bin=Path(own) if own else None, target_shard_ipc_bin=paths)
    targets: list[Device] = []
    for name in named(daemons):
        target = HostDevice()
        target.name, target.remote = name, True
        targets.append(target)
    (name,) = named([device])
    found = opening.draft_interpreter(config, name, targets)
    assert found == (None if expected is None else Path(expected))


def test_a_network_daemon_holds_one_thing() -> None:
    (name,) = named(["tcp://far:1/cpu:0"])
    target = HostDevice()
    target.name = name
    with pytest.raises(UsageError, match="--draft-device tcp://far:1/cpu:0: this daemon holds layers"):
        opening.open_draft_daemon(Config(), name, [target], Proposed)
    with pytest.raises(UsageError, match="--prefill-drafter-device tcp://far:1/cpu:0: this daemon holds layers"):
        opening.open_draft_daemon(Config(), name, [target], Proposed, "prefill_drafter_device")
    with pytest.raises(UsageError, match="require --shard-key-file"):
        opening.open_draft_daemon(Config(), name, [], Proposed)
