"""A machine behind a cable finds its coordinator by mDNS, beside another one, and says so where multicast is dropped.

CL-A3 of the acceptance tests; the seconds that lookups took are printed, not judged.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from luce.cluster.coordinator import Coordinator
from luce.errors import DeviceError
from tests.support.cluster_processes import starting
from tests.support.daemons import within
from tests.support.network_namespaces import ADDRESS, NAMESPACE, NETWORK, cable, drop_multicast

__all__ = ["cable"]
#: what the member's side of the cable runs
PREFIX = ["ip", "netns", "exec", NAMESPACE]


def test_two_clusters_side_by_side_and_dropped_multicast(
    cable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("zeroconf", reason="finds servers, as the extra cluster does")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "coordinators"))
    with starting(tmp_path) as start, contextlib.ExitStack() as opened:
        clusters = {
            name: opened.enter_context(contextlib.closing(Coordinator(name, f"{ADDRESS}:0", announce=True)))
            for name in ("home", "den")
        }
        for name, coordinator in clusters.items():
            token = coordinator.new_token(300, lan=True)
            member = start(f"in-{name}", "join", "-", "--devices", "cpu:0", prefix=PREFIX, stdin=token + "\n")
            member.found("looking for the server")
            begun = time.monotonic()
            assert member.found(r"server found address=(\S+)") == coordinator.addresses[0]
            with capsys.disabled():
                print(f"\n{name}: found after {time.monotonic() - begun:.1f} s")
            member.found("joined cluster=")
            assert coordinator.wait_for_members(1, 60) == 1, member.log
        addresses = {name: [m.address for m in made.status().members] for name, made in clusters.items()}
        assert addresses == {"home": [f"{NETWORK}2"], "den": [f"{NETWORK}2"]}

        drop_multicast()
        token = clusters["home"].new_token(300, lan=True)
        lost = start("lost", "join", "-", "--devices", "cpu:0", prefix=PREFIX, stdin=token + "\n")
        lost.found("looking for the server")
        begun = time.monotonic()
        assert lost.ended() == DeviceError.exit_code
        with capsys.disabled():
            print(f"multicast dropped: `luce join` ended after {time.monotonic() - begun:.1f} s")
        assert "mDNS" in lost.log[-1] and "join with a token that has an address" in lost.log[-1], lost.log
        # With an address it joins all the same.
        again = start("lost", "join", "-", "--devices", "cpu:0", prefix=PREFIX, stdin=clusters["home"].new_token(300))
        again.found("joined cluster=home")
        assert within(60, lambda: len(clusters["home"].status().members) == 2)
