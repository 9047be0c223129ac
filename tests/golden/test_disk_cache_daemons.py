"""Snapshots that daemons write and read: what a sequence resumed from the disk says is what the whole one says."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from luce.backend import layersplit
from luce.errors import ShardLostError
from luce.ipc.child import Child
from luce.kvcache import saver
from luce.remote import saved_state
from luce.remote.messages import Fetch, Forward, LoadState, Save
from luce.remote.rpc import Requests
from luce.remote.saved_state import RemoteSavedState
from luce.shard.pipeline import Pipeline
from luce.shard.saved_state import JoinedSavedState
from tests.support.daemons import within
from tests.support.disk_models import PLACEMENTS, ask, placed, saved
from tests.support.reference import Reference


@pytest.mark.parametrize(
    ("before", "after"), [("one", other) for other in PLACEMENTS] + [(other, "one") for other in PLACEMENTS]
)
def test_daemons_restore_what_this_process_saved_and_the_reverse(before: str, after: str, tmp_path: Path) -> None:
    # Its last layers borrow keys and values of others, which their shards mirror; it has windows, too.
    reference = Reference("gemma4-e-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with placed(reference, tmp_path / "cache", before) as model:
        assert ask(model, prompt, 32) == (expected, 0, "none")
    with placed(reference, tmp_path / "cache", after) as model:
        assert ask(model, prompt, 32) == (expected, saved(model, prompt), "disk")
        # Now from where the shards themselves have put it aside, also when others have had the pages.
        for _ in range(2):
            assert ask(model, prompt, 32) == (expected, len(prompt), "ram")
            ask(model, prompt[::-1], 1)


def test_activations_of_fewer_bits_have_snapshots_of_their_own(tmp_path: Path) -> None:
    reference = Reference("qwen3-a-F32")
    prompt = reference.expected["prompt_long"].tolist()
    tiers = []
    for kind in ("f32", "bf16", "bf16", "f32"):
        placement = {"shard_transport": "stream", "shard_activations": kind}
        with placed(reference, tmp_path / "cache", "daemons", **placement) as model:
            tiers.append(ask(model, prompt, 4)[2])
    assert tiers == ["none", "none", "disk", "disk"]


@pytest.mark.parametrize("placement", ["daemons", "network"])
def test_recurrent_states_go_to_daemons_and_come_from_there(placement: str, tmp_path: Path) -> None:
    reference = Reference("qwen35-a-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    for after in (placement, "one", placement):
        with placed(reference, tmp_path / "cache", after) as model:
            assert ask(model, prompt, 32)[0] == expected
    assert len(list((tmp_path / "cache").rglob("state-*-*.part"))) > 1


def test_data_of_remote_shards_passes_in_small_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, window = Reference("qwen35-a-F32"), 100_000
    monkeypatch.setattr(saved_state, "WINDOW_BYTES", window)
    fetched: list[int] = []
    fetch = RemoteSavedState.fetch

    def watched(saved: RemoteSavedState, names: list[str], *given: Any) -> Any:
        tensors = fetch(saved, names, *given)
        fetched.append(sum(tensor.nbytes for tensor in tensors.values()))
        assert len(tensors) == 1 or fetched[-1] <= window
        return tensors

    monkeypatch.setattr(RemoteSavedState, "fetch", watched)
    prompt = reference.expected["prompt_long"].tolist()
    with placed(reference, tmp_path / "cache", "daemons") as model:
        ask(model, prompt, 4)
        cache = model.engine.cache
        assert cache is not None
        # The saved states of daemons count here, and none of their bytes are in this process.
        remote = [
            part
            for checkpoint in cache.memory.tree.checkpoints
            for part in cast("JoinedSavedState", checkpoint.state).parts[1:]
        ]
        assert remote and all(isinstance(part, RemoteSavedState) and part.nbytes for part in remote)
    assert len(fetched) > 3 and sum(fetched) > 3 * window


def test_a_daemon_is_asked_only_while_its_shard_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine does not wait for steps without output: they may still run.
    reference = Reference("qwen35-a-F32")
    monkeypatch.setattr(saved_state, "WINDOW_BYTES", 50_000)
    monkeypatch.setattr(saver, "PAUSE_RATIO", 0)
    idle: list[bool] = []
    pipelines: list[Pipeline] = []
    ask_daemon = Requests.ask

    class WatchedPipeline(Pipeline):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            pipelines.append(self)

    def watched(requests: Requests, message: Any, *given: Any, **more: Any) -> Any:
        if not isinstance(message, Forward):
            idle.append(pipelines[-1].idle)
        return ask_daemon(requests, message, *given, **more)

    monkeypatch.setattr(layersplit, "Pipeline", WatchedPipeline)

    prompt = reference.expected["prompt_long"].tolist()
    with placed(reference, tmp_path / "cache", "daemons", max_ctx=2048, chunk=16) as model:
        monkeypatch.setattr(Requests, "ask", watched)
        for turn in range(2):
            ask(model, [turn, *prompt, *prompt[::-1]], 2)
        assert len(idle) > 20 and all(idle)


@pytest.mark.parametrize("kind", [Save, Fetch, LoadState])
def test_a_daemon_that_ends_costs_the_request_and_not_the_snapshots(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference("qwen35-a-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with placed(reference, tmp_path / "cache", "one") as model:
        known = saved(model, prompt)
        ask(model, prompt, 4)
    ask_daemon = Requests.ask
    calls: list[int] = []

    def deadly(requests: Requests, message: Any, *given: Any) -> Any:
        if isinstance(message, kind):
            calls.append(1)
            if len(calls) == 2:
                peer = requests.daemon.peer
                assert isinstance(peer, Child)
                os.kill(peer.process.pid, signal.SIGKILL)
        return ask_daemon(requests, message, *given)

    monkeypatch.setattr(Requests, "ask", deadly)
    with placed(reference, tmp_path / "cache", "daemons") as model:
        # Other prompts and this one, until the daemon has ended; then everything is as before.
        for ids in (prompt[::-1], prompt, prompt[::-1], prompt):
            with suppress(ShardLostError):
                ask(model, ids, 4)
        assert len(calls) > 1
        assert ask(model, prompt, 32)[0] == expected
    with placed(reference, tmp_path / "cache", "daemons") as model:
        assert ask(model, prompt, 32) == (expected, known, "disk")


def test_a_copy_that_fails_while_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon ends between the start of a copy and the moment when the engine, without requests, waits for it."""
    waits = []

    def wait(state: JoinedSavedState) -> None:
        waits.append(state)
        raise ShardLostError("lost")

    monkeypatch.setattr(JoinedSavedState, "ready", lambda state: False)
    monkeypatch.setattr(JoinedSavedState, "wait", wait)
    reference = Reference("qwen3-a-F32")
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with placed(reference, tmp_path / "cache", "daemons") as model:
        assert ask(model, prompt, 32)[0] == expected
        assert within(30, lambda: "a checkpoint could not be written: lost" in caplog.text)
    assert len(waits) > 1
