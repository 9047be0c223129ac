"""Which devices are in daemons, with which interpreter, and which devices share a daemon."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.config.resolve import resolve
from luce.config.settings import Config
from luce.errors import UsageError
from luce.remote import open as opening
from luce.runtime.open import named
from tests.support.daemons import HERE
from tests.support.drafts import DraftReference

FIT = DraftReference("qwen35-a-draft-fit-F32")


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
def test_interpreters_that_no_device_uses(devices: str, given: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=f"^--target-shard-ipc-bin.*{why}"):
        places(devices, given)


@pytest.mark.parametrize(
    "settings", [{}, {"target_shard_ipc_bin": (("", Path("/none")),)}, {"shard_transport": "stream"}], ids=str
)
def test_16_bits_without_messages_are_refused(settings: dict[str, Any]) -> None:
    config = Config(target_devices=("cpu:0", "cpu:1"), shard_activations="bf16", **settings)
    with pytest.raises(UsageError, match="--shard-activations bf16: activations travel in messages only") as caught:
        opening.open_placement(config)
    assert caught.value.param == "shard_activations"


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"target_shard_ipc_bin": "{}"}, "--target-shard-ipc-bin {}"),
        ({"target_shard_ipc_bin": "cpu={}"}, "--target-shard-ipc-bin {}"),
        ({"draft": str(FIT.path), "draft_ipc_bin": "{}"}, "--draft-ipc-bin {}"),
    ],
)
def test_an_interpreter_that_is_not_there(settings: dict[str, str], setting: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not to be run")
    for path, program in ((tmp_path, tmp_path / "bin/python"), (tmp_path / "text",) * 2, (Path("no-python-9"),) * 2):
        given = {name: value.format(path) for name, value in settings.items()}
        with pytest.raises(UsageError) as caught:
            luce.load(FIT.target.path, target_devices="cpu:0,cpu:1", **given)
        assert str(caught.value) == f"{setting.format(path)}: {program} does not exist, or is not executable"
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"target_shard_ipc_bin": HERE}, "hip"),
        ({"target_shard_ipc_bin": HERE, "draft": "ngram"}, "hip"),
        ({"target_shard_ipc_bin": HERE, "draft": "x", "draft_device": "cuda:0"}, "hip"),
        ({"draft": "x", "draft_ipc_bin": HERE, "draft_device": "hip:0"}, "cpu"),
    ],
)
def test_variables_for_a_backend_without_a_daemon(settings: dict[str, Any], refused: str) -> None:
    config = resolve({"target_devices": "cpu:0,cpu:1", "shard_env": "hip:A=1,cpu:B=2", **settings}, env={})
    with pytest.raises(UsageError, match=f"^--shard-env {refused}: no {refused} daemon is started$"):
        opening.open_placement(config)


def test_variables_for_a_draft() -> None:
    given = {"draft": "x", "draft_ipc_bin": HERE, "target_devices": "cpu:0,cpu:1"}
    for device, variable in (("auto", "hip:A=1"), ("hip:0", "hip:A=1"), ("cpu:3", "cpu:A=1")):
        config = resolve({**given, "draft_device": device, "shard_env": variable}, env={})
        with ExitStack() as stack:
            assert [stack.enter_context(closing(device)) for device in opening.open_placement(config)]
