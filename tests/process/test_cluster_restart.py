"""A coordinator that is killed: its member holds no layers half a minute later, and is back soon after it starts again.
CL-A7 of the acceptance tests. The times and the memory are printed; how soon it is back is not judged."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from luce.errors import LuceError
from luce.hub.lookup import resolve_model
from tests.support.cluster_processes import (
    ask,
    greedy,
    member_of,
    members_of,
    resident,
    serve,
    serving_member,
    starting,
)
from tests.support.cluster_streams import replan
from tests.support.daemons import within

#: seconds behind the end of the coordinator after which its member holds no layers, and what it may take then, in MiB
FREED, OWN = 35.0, 80


@pytest.mark.slow
def test_a_member_frees_its_layers_and_is_back_behind_a_killed_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        model = resolve_model("smollm2", fetch=False)
    except LuceError as error:
        pytest.skip(f"{error} (luce pull smollm2 brings the file)")
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(model)
    with starting(tmp_path) as start:
        server, port = serve(start, "--cluster-min", "0", model=model)
        assert within(200, lambda: ask(port, "/health")[0] == 200), server.log
        token = server.found(r"luce join (\S+)")
        member = start("member", "join", token, "--model-dir", str(models), "--devices", "cpu:0")
        assert within(60, lambda: [m["state"] for m in members_of(start).values()] == ["idle"]), member.log
        before = resident(member)
        replan(start)
        # Its kernels are compiled first, where no earlier process left them.
        assert within(200, lambda: member_of(start)["state"] == "serving"), (server.log, member.log)
        expected, loaded = greedy(port), resident(member)

        address = server.found(r"address=(127\.0\.0\.1:\d+)")
        server.child.send_signal(signal.SIGKILL)
        server.ended()
        time.sleep(FREED)
        after = resident(member)
        again, port = serve(start, listen=address, model=model)
        listening = time.monotonic()
        assert within(60, lambda: member_of(start)["state"] in ("loading", "serving")), (again.log, member.log)
        back = time.monotonic() - listening
        assert within(200, lambda: ask(port, "/health")[0] == 200), (again.log, member.log)
        assert greedy(port) == expected and serving_member(start)
        with capsys.disabled():
            print(f"\na member: {before:.0f} MiB, with layers {loaded:.0f}, {FREED:g} s behind the loss {after:.0f}")
            print(f"back {back:.1f} s after the coordinator listened")
        # What the load added is gone but for code that it imported and compiled, also what the C library would keep.
        assert after < OWN < loaded
        for process in (member, again):
            process.child.send_signal(signal.SIGTERM)
            assert process.ended() == 0, process.log[-30:]
