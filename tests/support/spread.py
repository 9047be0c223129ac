"""The order of files of tests, for processes that share the cores: those whose tests wait come between those that
compute.

tests/process waits for daemons, clocks and other machines. One file after the other, every process of xdist would be
among them at the same time, and the cores idle; spread out, about one waits while the others compute. Not up to the
end, where a file that waits would be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

#: folders whose tests wait
WAITING = ("tests/process/",)
#: about the seconds of CPU of a file of a folder, by the start of its name; one of another folder takes one
SECONDS = {"tests/golden/": 12, "tests/contracts/": 5, "tests/crash/": 5, "tests/fuzz/": 5, "tests/http/": 3}
#: behind this share of the seconds no file that waits begins
LAST = 0.8


def spread(files: Sequence[str]) -> list[str]:
    """Files in the order in which processes take them; those that wait keep theirs, and so do the others."""
    waiting = [file for file in files if file.startswith(WAITING)]
    others = [file for file in files if not file.startswith(WAITING)]
    each = LAST * sum(map(_seconds, others)) / max(1, len(waiting))
    order, spent, begun = list[str](), 0.0, 0
    for file in others:
        while begun < len(waiting) and spent >= each * begun:
            order.append(waiting[begun])
            begun += 1
        order.append(file)
        spent += _seconds(file)
    return [*order, *waiting[begun:]]


def _seconds(file: str) -> float:
    return next((seconds for folder, seconds in SECONDS.items() if file.startswith(folder)), 1)
