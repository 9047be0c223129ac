"""The model moves under streams: layers that stay on their device are not read again."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.support.cluster_processes import REFERENCE, TOKENS, Process, Streams, ask, members_of, serve, starting
from tests.support.daemons import within


def loads(process: Process, count: int) -> list[tuple[int, int]]:
    """Of each load, the bytes of matrices that were read, and of those that were there. So many loads are over, whose
    lines may be on their way."""

    def found() -> list[tuple[str, str]]:
        return re.findall(r"weights loaded read=(\d+) kept=(\d+)", "".join(process.log))

    assert within(30, lambda: len(found()) >= count) and len(found()) == count, process.log
    return [(int(read), int(kept)) for read, kept in found()]


def test_layers_that_stay_are_not_read_again(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "model.gguf").symlink_to(REFERENCE.path)
    flags = ["--model-dir", str(models), "--devices", "cpu:0"]
    with starting(tmp_path) as start:
        server, port = serve(start, "--parallel", "4")
        box = start("box", "join", server.found(r"luce join (\S+)"), *flags)
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, box.log)
        (first,) = loads(box, 1)
        assert first[0] > 0 and first[1] == 0
        expected = Streams(port).wait()
        assert all(len(ids) == TOKENS for ids in expected)
        token = start("server", "cluster", "token")
        assert token.ended() == 0
        den = start("den", "join", re.findall(r"luce join (\S+)", "".join(token.out))[0], *flags)

        def states() -> list[str]:
            return sorted(member["state"] for member in members_of(start).values())

        def move(count: int) -> None:
            """Let the model move under streams, to so many members."""
            streams = Streams(port)
            streams.wait_begun(10)
            assert start("server", "cluster", "replan").ended() == 0
            assert streams.wait() == expected, server.log[-30:]
            assert within(60, lambda: states().count("serving") == count), server.log[-30:]

        assert within(60, lambda: states() == ["idle", "serving"])
        move(2)
        assert loads(den, 1)[0][0] > 0 and loads(den, 1)[0][1] == 0
        # The server's last layers went on to the first member, and those of that one to the second.
        ((read, kept),) = loads(server, 1)
        assert read == 0 and kept > 0
        assert loads(box, 2)[1][0] > 0
        # Nothing moves: nothing is read.
        move(2)
        for process, count in ((server, 2), (box, 3), (den, 2)):
            read, kept = loads(process, count)[-1]
            assert read == 0 and kept > 0, process.log
        # Those that come back are read, and no others.
        den.child.send_signal(signal.SIGTERM)
        assert den.ended() == 0 and within(60, lambda: "serving" in states())
        assert min(loads(server, 3)[-1]) > 0, server.log
        streams = Streams(port)
        assert streams.wait() == expected
