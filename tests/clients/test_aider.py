"""aider without a terminal, set up by `luce connect`, against the application over a scripted model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.client_programs import Program, need, recorded
from tests.support.http_server import running
from tests.support.scripted_model import saying

#: without questions, and without what it asks of others
FLAGS = (
    "--yes-always",
    "--no-check-update",
    "--no-show-release-notes",
    "--analytics-disable",
    "--no-show-model-warnings",
    "--no-pretty",
)
EDIT = "Here it is.\n\nout.txt\n```\nforty-two\n```\n"


@pytest.fixture
def aider(tmp_path: Path) -> Program:
    return Program(need("aider", "aider/bin"), tmp_path)


async def test_an_edit_lands_in_the_file(aider: Program) -> None:
    subprocess.run(["git", "init", "-q"], cwd=aider.work, check=True)
    async with running(model={"context": 16384, "script": saying(EDIT)}) as here:
        await aider.connect("aider", here)
        with recorded() as bodies:
            ended = await aider.run(
                *FLAGS, "--env-file", str(aider.home / ".aider.luce.env"), "--message", "Write it.", "out.txt"
            )
        assert ended.status == 0 and (aider.work / "out.txt").read_text() == "forty-two\n", ended
        assert json.loads(bodies[0])["model"] == "scripted"
