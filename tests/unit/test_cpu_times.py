"""The table of CPU seconds: of this process and its children, also from processes of xdist."""

from __future__ import annotations

import re

import pytest

CODE = """
    import subprocess, sys, time

    BUSY = "import time\\nwhile time.process_time() < 0.4: pass"

    def test_here():
        exec(BUSY.replace("0.4", f"{time.process_time() + 0.4}"))

    def test_elsewhere():
        subprocess.run([sys.executable, "-c", BUSY], check=True)

    def test_waiting():
        time.sleep(0.4)
"""


@pytest.mark.parametrize("flags", [(), ("-n", "1")], ids=["here", "xdist"])
def test_what_the_table_counts(flags: tuple[str, ...], pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CODE)
    ran = pytester.runpytest_inprocess("-p", "tests.support.cpu_times", "-p", "no:asyncio", *flags)
    ran.assert_outcomes(passed=3)
    table = re.search(r"seconds of CPU.*\s+([\d.]+) all\n +([\d.]+) (\S+\.py)\n", ran.stdout.str())
    assert table is not None and table[1] == table[2], ran.stdout.str()
    assert float(table[1]) >= 0.8
