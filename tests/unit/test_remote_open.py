"""Which devices go to daemons, with which interpreter, and which share one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from luce.config.settings import Config
from luce.errors import UsageError
from luce.remote import open as opening
from luce.runtime.open import named


def places(text: str, given: dict[str, str], *, isolate: bool = False) -> tuple[str, Sequence[object]]:
    """Interpreter of each device (. for this process), and the daemons' devices."""
    devices = named(text.split(","))
    paths = opening.daemon_interpreters(devices, {kind: Path(path) for kind, path in given.items()})
    groups = opening.daemon_groups(devices, paths, isolate=isolate)
    return "".join("." if path is None else str(path) for path in paths), groups


TABLE = [
    # devices, interpreters, vendor of this process's CuPy, where each goes, daemons
    ("cuda:0,hip:0,hip:1", {"": "p"}, "cuda", ".pp", [[1, 2]]),
    ("hip:0,cuda:0,hip:1", {"": "p"}, "cuda", "p.p", [[0], [2]]),
    ("hip:0,cuda:0,hip:1", {"": "p"}, "hip", ".p.", [[1]]),
    ("hip:0,cuda:0,hip:1", {"": "p"}, None, ".p.", [[1]]),
    ("cpu:0,cuda:0,hip:1", {"": "p"}, "cuda", "..p", [[2]]),
    ("cuda:0,cuda:1,cuda:2", {"": "p"}, "cuda", ".pp", [[1, 2]]),
    ("cpu:0,cpu:1", {"": "p"}, None, ".p", [[1]]),
    ("cuda:0,cuda:1,cpu:0", {"": "p"}, "cuda", ".pp", [[1], [2]]),
    ("cuda:0,hip:0", {"hip": "h", "cuda": "c"}, "cuda", "ch", [[0], [1]]),
    ("cuda:0,hip:0,cpu:0,hip:1", {"hip": "h"}, "cuda", ".h.h", [[1], [3]]),
    ("cuda:0,cpu:0", {"cpu": "c"}, "cuda", ".c", [[1]]),
    ("cpu:0", {"cpu": "c"}, None, "c", [[0]]),
]


@pytest.mark.parametrize(("devices", "given", "own", "where", "daemons"), TABLE)
def test_where_devices_go(
    devices: str,
    given: dict[str, str],
    own: str | None,
    where: str,
    daemons: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "cupy_vendor", lambda: own)
    assert places(devices, given) == (where, daemons)
    alone = [[number] for group in daemons for number in group]
    assert places(devices, given, isolate=True) == (where, alone)


@pytest.mark.parametrize(
    ("devices", "given", "why"),
    [("cuda:0", {"": "p"}, "two or more devices"), ("cuda:0,cuda:1", {"hip": "h"}, "no hip device is named")],
)
def test_interpreters_without_a_use(devices: str, given: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=f"^--target-shard-ipc-bin.*{why}"):
        places(devices, given)


@pytest.mark.parametrize(
    "settings", [{}, {"target_shard_ipc_bin": (("", Path("/none")),)}, {"shard_transport": "stream"}], ids=str
)
def test_16_bits_where_nothing_travels_are_refused(settings: dict[str, Any]) -> None:
    config = Config(target_devices=("cpu:0", "cpu:1"), shard_activations="bf16", **settings)
    with pytest.raises(UsageError, match="--shard-activations bf16: activations travel in messages only") as caught:
        opening.open_placement(config)
    assert caught.value.param == "shard_activations"
