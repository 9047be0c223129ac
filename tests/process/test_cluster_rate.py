"""A cluster over a cable of 100 Mbit/s, and over one of 1 Gbit/s with a relay that delays: the planner measures both
links, and predicts with them. CL-A9 of the acceptance tests. Predicted and measured speed are printed, not judged: what
else runs here decides about them too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster_processes import REFERENCE

TOOL = Path(__file__).parents[2] / "tools" / "check_cluster_rate.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_planner_sees_how_fast_a_cable_is(capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() or shutil.which("tc") is None or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("makes a network namespace, which only root can, with the programs ip and tc, and needs two cores")
    command = [sys.executable, str(TOOL), str(REFERENCE.path), "--rounds", "1", "--prompt", "1024"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    with capsys.disabled():
        print(done.stdout)
    # 1: the speed is not what was predicted.
    assert done.returncode in (0, 1)
    links = re.findall(r"by the planner (\S+) MB/s, (\S+) ms", done.stdout)
    assert len(links) == len(re.findall(r"^decoding: ", done.stdout, re.MULTILINE)) == 2
    (slow, _), (fast, late) = ((float(rate), float(latency)) for rate, latency in links)
    # What the first packets of a burst gain may be counted.
    assert 0 < slow < 100e6 / 8 / 1e6 * 1.1 < fast and late >= 1
