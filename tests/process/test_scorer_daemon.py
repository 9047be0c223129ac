"""Small models in daemons score as those in this process do, even if the daemon dies while it reads a text."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luce
from luce.compress.open import ScorerPlan, plan_scorer
from luce.compress.remote import RemoteScorer
from luce.compress.scorer import TextScorer
from luce.config.settings import Config
from luce.errors import LuceError, RequestError, ShardLostError
from luce.remote.device import is_remote
from tests.support.daemons import HERE, key_file, nothing_left, pid_of, within
from tests.support.reference import Reference
from tools.listening_daemon import listener

SMALL = Reference("qwen3-a-F32")
TOKENS = np.random.default_rng(0).integers(0, SMALL.spec.vocab, 300).astype(np.int32)
DAEMON: dict[str, Any] = {
    "cpu_weights": "float32",
    "chunk": 16,
    "shard_start_timeout": 60.0,
    "target_shard_ipc_bin": (("cpu", HERE),),
}


@contextmanager
def planned(device: str = "cpu:1", **settings: Any) -> Iterator[ScorerPlan]:
    with ExitStack() as opened:
        yield plan_scorer(opened, Config(**{**DAEMON, **settings}), str(SMALL.path), [], device)


def local() -> np.ndarray:
    with ExitStack() as opened:
        plan = plan_scorer(opened, Config(cpu_weights="float32", chunk=16), str(SMALL.path), [], "cpu:0")
        scorer = plan.load(None)
        opened.callback(scorer.close)
        assert isinstance(scorer, TextScorer)
        return scorer(TOKENS)


def pid(plan: ScorerPlan) -> int:
    assert is_remote(plan.device)
    return pid_of(plan.device)


def test_scores_are_those_of_this_process(caplog: pytest.LogCaptureFixture) -> None:
    expected = local()
    with nothing_left(caplog), planned() as plan:
        (claim,) = plan.claims
        assert claim.device is plan.device and str(plan.device.name) == "cpu:1"
        scorer = plan.load(None)
        assert isinstance(scorer, RemoteScorer)
        np.testing.assert_array_equal(scorer(TOKENS), expected)
        assert scorer(TOKENS[:0]).shape == (0,)
        scorer.close()
        scorer.close()
        # The weights come back for the next user.
        again = plan.load(None)
        np.testing.assert_array_equal(again(TOKENS), expected)
        again.close()
        del scorer, again, plan, claim


def test_a_client_that_leaves_ends_the_work() -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        raise RequestError("the client has left", code="cancelled")

    with planned() as plan:
        scorer = plan.load(None)
        long = np.resize(TOKENS, 4000)
        with pytest.raises(RequestError, match="the client has left"):
            scorer(long, check=check)
        assert calls == [1]
        np.testing.assert_array_equal(scorer(TOKENS), local())


def test_a_daemon_that_dies_gets_the_text_again() -> None:
    with planned() as plan:
        scorer = plan.load(None)
        expected = scorer(np.resize(TOKENS, 4000))
        killed: list[int] = []

        def check() -> None:
            if not killed:
                killed.append(pid(plan))
                os.kill(killed[0], signal.SIGKILL)

        np.testing.assert_array_equal(scorer(np.resize(TOKENS, 4000), check=check), expected)
        assert killed and pid(plan) != killed[0]


def test_a_daemon_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luce.ipc.supervisor.RESTARTS", 0)
    with planned() as plan:
        scorer = plan.load(None)
        os.kill(pid(plan), signal.SIGKILL)
        with pytest.raises(ShardLostError, match="prefill drafter on cpu:1"):
            scorer(TOKENS)
        scorer.close()


def test_over_a_network(tmp_path: Path) -> None:
    key = key_file(tmp_path / "key")
    with listener(SMALL.path, key, prefill_drafter=SMALL.path) as (port, _):
        device = f"tcp://127.0.0.1:{port}/cpu:0"
        settings = {"shard_key_file": key, "target_shard_ipc_bin": ()}
        with planned(device, **settings) as plan:
            assert plan.claims == ()
            scorer = plan.load(None)
            # The other machine's cpu:0 has packed weights or not, as the server says.
            np.testing.assert_array_equal(scorer(TOKENS), local())
            scorer.close()


def test_a_file_that_is_not_the_servers(tmp_path: Path) -> None:
    key = key_file(tmp_path / "key")
    with listener(SMALL.path, key, prefill_drafter=Reference("qwen35-a-F32").path) as (port, _):
        settings = {"shard_key_file": key, "target_shard_ipc_bin": ()}
        with (
            planned(f"tcp://127.0.0.1:{port}/cpu:0", **settings) as plan,
            pytest.raises(LuceError, match="the daemon's file is not the server's"),
        ):
            plan.load(None)


def test_a_dead_daemon_fails_no_request() -> None:
    """The daemon of the small model is shown beside those of layers, and prompts are read whole without it."""
    settings: dict[str, Any] = {
        "max_ctx": 512,
        "target_devices": "cpu:0,cpu:1",
        "target_shard_ipc_bin": f"cpu={HERE}",
        "shard_start_timeout": 60.0,
        "prefill_drafter": str(SMALL.path),
        "prefill_drafter_device": "cpu:2",
        "prefill_compression": "always",
        "prefill_keep_ratio": 0.2,
    }
    with luce.load(SMALL.path, **settings) as model:
        assert within(60, lambda: "cpu:2" in model.memory())
        states = {state.shard: state for state in model.daemons()}
        assert states["prefill_drafter"].device == "cpu:2" and states["prefill_drafter"].up
        ids = TOKENS.tolist()
        compressed = model.compression.read(ids)
        assert compressed.shortened
        compressor = model.compression.compressor
        assert compressor is not None and compressor.facts["device"] == "cpu:2"
        assert len(list(model.generate(ids, max_tokens=2, temperature=0, ignore_eos=True))) >= 2
