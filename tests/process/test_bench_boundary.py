"""tools/bench_boundary.py, which looks into the program: what it looks for is there, without a GPU too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.reference import Reference

TOOL = Path(__file__).parents[2] / "tools" / "bench_boundary.py"
PARTS = ["copy out", "message", "wake-up", "queue", "copy in", "reply: there", "reply: read"]


@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_the_parts_of_a_boundary(transport: str) -> None:
    command = [sys.executable, str(TOOL), str(Reference("qwen35-a-Q8_0").path), "--devices", "cpu:0,cpu:1"]
    command += ["-n", "8", "-p", "16", "--transport", transport]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    assert "tokens equal" in text
    found = {name.strip(): float(value) for name, value in re.findall(r"^(.+?) +(-?[\d.]+) us$", text, re.MULTILINE)}
    assert list(found)[: len(PARTS)] == PARTS
    assert abs(sum(found[part] for part in PARTS) - found["the boundary, sum of the parts"]) < 0.5
