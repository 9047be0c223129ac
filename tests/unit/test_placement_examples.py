"""The worked examples of docs/guide/placement.md: each command prints what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from luce.cli import plan
from luce.cli.main import main
from luce.runtime.host import HostDevice
from tests.support.published import PUBLISHED

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "placement.md"
#: command and output
EXAMPLES = re.findall(r"^```console\n\$ luce (.*?[^\\])\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
MODEL = "Qwen3.6-27B"


class Packed(HostDevice):
    """A device that holds weights and keys as GPUs do."""

    packed = True
    kv_dtype = np.dtype(np.float16)


def printed(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `luce` prints for a command of the page, whose file is the header of a published model."""
    path = next(model for model in PUBLISHED if model.name == MODEL).write(folder)
    words = [str(path) if word == f"{MODEL}.gguf" else word for word in shlex.split(command)]
    assert str(path) in words
    assert main(words) == 0
    return "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_an_example_prints_what_the_page_shows(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    # The devices of the machine take no part.
    monkeypatch.setattr(plan, "open_placement", lambda config: [Packed()])
    assert printed(command, tmp_path, capsys) == output


def test_the_page_has_its_examples() -> None:
    assert len(EXAMPLES) >= 5
