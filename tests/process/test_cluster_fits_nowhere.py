"""A model that does not fit without a member: 503 says what is missing, until the member is there again."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.cluster_processes import (
    EXPECTED,
    REFERENCE,
    Streams,
    ask,
    greedy,
    member_of,
    refusal,
    serve,
    starting,
)
from tests.support.daemons import within

#: runs a program on a machine whose free memory is what the file says
SMALL = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /proc/meminfo && exec "$@"']


def test_a_server_says_what_is_missing_until_its_member_is_back(tmp_path: Path) -> None:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("gives a process a memory of its own, which only root can, with the program unshare")
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    flags = ["--model-dir", str(models), "--devices", "cpu:0"]
    memory = tmp_path / "meminfo"
    memory.write_text("MemAvailable: 100000000 kB\n")
    with starting(tmp_path) as start:
        more = ["--parallel", "4", "--cluster-on-loss", "replan", "--cluster-resume", "5"]
        server, port = serve(start, *more, prefix=[*SMALL, str(memory)])
        member = start("member", "join", server.found(r"luce join (\S+)"), *flags)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, member.log)
        expected, name = Streams(port).wait(), member_of(start)["name"]
        # Too little for the whole model beside what else it keeps free.
        memory.write_text("MemAvailable: 1 kB\n")
        streams = Streams(port)
        streams.wait_begun(10)
        member.child.kill()
        server.found("no placement reason=")
        for thread in streams.threads:
            thread.join()
        assert all(name in error for error in streams.errors), streams.errors
        assert all(ids == whole[: len(ids)] for ids, whole in zip(streams.ids, expected, strict=True))
        missing = rf"^the model does not fit without {name}: .* need [0-9]+ bytes .*[0-9]+ are free"
        status, health = ask(port, "/health")
        assert status == 503 and re.search(missing, health["reason"]), health
        code, message = refusal(port)
        assert code == "shard_lost" and re.search(missing, message), message
        # Once it is there again, nobody has to ask for it.
        memory.write_text("MemAvailable: 100000000 kB\n")
        member = start("member", "join", "--cluster", "home", *flags)
        assert within(120, lambda: ask(port, "/health")[0] == 200), (server.log, member.log)
        assert greedy(port) == EXPECTED
