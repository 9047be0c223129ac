"""A cluster over a cable of 100 Mbit/s: the planner measures it, and predicts with it. CL-A9 of the acceptance tests.

Predicted and measured speed are printed, not judged: what else runs here decides about them too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster_processes import EXPECTED, PROMPT, REFERENCE, ask, greedy, serve, starting
from tests.support.network_namespaces import ADDRESS, NAMESPACE, cable, limit_rate

__all__ = ["cable"]
#: bytes per second that the cable carries, with what the first packets of a burst gain
MOST = 100e6 / 8 * 1.1


@pytest.mark.slow
def test_the_planner_sees_how_fast_the_cable_is(
    cable: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit_rate(100)
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    with starting(tmp_path) as start:
        planned = ["--devices", "cpu:1", "--optimize", "balanced", "--pin-devices", "--optimize-prompt", "187"]
        planned += ["--measure-budget", "300"]
        server, port = serve(start, *planned, listen=f"{ADDRESS}:0")
        flags = ["--model-dir", str(models), "--devices", "cpu:0"]
        prefix = ["ip", "netns", "exec", NAMESPACE]
        start("member", "join", "-", *flags, prefix=prefix, stdin=server.found(r"luce join (\S+)") + "\n")
        server.found("ready model=", 400)
        assert greedy(port) == EXPECTED
        for number in range(4):
            body = {"prompt": [number, *PROMPT * 11], "n_predict": 64, "temperature": 0, "ignore_eos": True}
            assert ask(port, "/completion", body)[0] == 200
        shown = start("server", "cluster", "status", "--json")
        assert shown.ended() == 0, shown.log
        status = json.loads("".join(shown.out))
        (box,), plan = status["members"], status["plan"]
        assert [stage["device"] for stage in plan["stages"]] == ["cpu:0", "cpu:1", f"member://{box['name']}/cpu:0"]
        assert 0 < box["bytes_per_second"] < MOST
        with capsys.disabled():
            print(f"\nlink {box['bytes_per_second'] / 1e6:.2f} MB/s, round trip {box['round_trip_ms']:.2f} ms")
            for what in ("decode", "prompt"):
                predicted, measured = (plan[f"{kind}_{what}_tok_s"] for kind in ("predicted", "measured"))
                print(f"{what}: predicted {predicted:.0f} tok/s, measured {measured:.0f}: {measured / predicted:.2f}")
