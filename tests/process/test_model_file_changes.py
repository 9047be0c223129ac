"""The model file changes under a load and under a loaded model, of this process and of a daemon: no process dies
without a word, no reply is wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import luce
from luce.api import Model
from luce.errors import ShardLostError
from luce.gguf.reader import open_gguf
from luce.ipc import supervisor
from tests.support.daemons import HERE, children

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "reference" / "qwen3-a-F32.gguf"

# Changes the file at the given moment, and asks before and after. The directory tells how.
PROGRAM = """
import os, shutil, sys
from pathlib import Path
from luce.assembly import open_model
from luce.config.resolve import resolve
from luce.errors import ModelError

path, change, moment, devices = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]

def apply(share=None):
    if change == "truncate":
        os.truncate(path, 4096)
    elif change == "zero":
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    elif change == "replace":
        new = path.with_name("new")
        new.write_bytes(b"another file")
        new.replace(path)

def ask(model):
    return [token.id for token in model.generate([1, 2, 3, 4, 5], max_tokens=8, temperature=0.0, ignore_eos=True)]

config = resolve({"target_devices": devices, "max_ctx": 128, "kv_cache_dir": "off"}, spell=str)
try:
    model = open_model(path, config, apply if moment == "loading" else lambda share: None)
except ModelError as error:
    print("refused:", error)
    sys.exit(3)
with model:
    first = ask(model)
    if moment == "loaded":
        apply()
    # Other tokens, whose rows of the embedding have not been read yet.
    second = [t.id for t in model.generate([40, 50, 60, 70], max_tokens=8, temperature=0.0, ignore_eos=True)]
    print(first == ask(model), second)
"""


def run(tmp_path: Path, change: str, moment: str, devices: str = "cpu:0") -> tuple[int, str]:
    path = tmp_path / "model.gguf"
    shutil.copy(SOURCE, path)
    os.utime(path, ns=(10**18, 10**18))
    command = [sys.executable, "-c", PROGRAM, str(path), change, moment, devices]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    return done.returncode, done.stdout


@pytest.mark.parametrize("change", ["truncate", "zero", "replace"])
def test_a_loaded_model_goes_on_as_before(change: str, tmp_path: Path) -> None:
    assert run(tmp_path, change, "loaded") == run(tmp_path, "none", "loaded")


@pytest.mark.parametrize("change", ["truncate", "zero"])
def test_a_load_is_refused_with_the_name_of_the_file(change: str, tmp_path: Path) -> None:
    status, shown = run(tmp_path, change, "loading", "cpu:0,cpu:1")
    assert status == 3 and shown.startswith(f"refused: {tmp_path / 'model.gguf'}: was changed while it was read")


def test_a_load_goes_on_with_a_file_that_is_replaced(tmp_path: Path) -> None:
    assert run(tmp_path, "replace", "loading", "cpu:0,cpu:1") == run(tmp_path, "none", "loading", "cpu:0,cpu:1")


def split(path: Path) -> Model:
    """A model whose second half is in a daemon, which reads the file itself."""
    return luce.load(path, target_devices="cpu:0,cpu:1", target_shard_ipc_bin=HERE, max_ctx=128, kv_cache_dir="off")


def reply(model: Model) -> list[int]:
    return [token.id for token in model.generate([1, 2, 3, 4, 5], max_tokens=8, temperature=0.0, ignore_eos=True)]


def change_in_place(path: Path, change: str) -> None:
    """Cut the file off, or fill all of it, or its tensors, with zeros."""
    if change == "truncate":
        os.truncate(path, 4096)
        return
    with open_gguf(path) as opened:
        begin = min(info.offset for info in opened.tensors.values()) if change == "zero tensors" else 0
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(path.stat().st_size - begin))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("truncate", "the value of .* passes the end of the file at 4096 bytes"),
        ("zero", "is not a GGUF file"),
        ("zero tensors", "the daemon's file is not the server's: their contents differ"),
    ],
)
def test_a_daemon_goes_on_as_before_and_is_not_replaced(
    change: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTARTS", 1)
    path = tmp_path / "model.gguf"
    shutil.copy(SOURCE, path)
    with split(path) as model:
        (pid,) = children()
        expected = reply(model)
        change_in_place(path, change)
        assert reply(model) == expected and children() == {pid}
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ShardLostError, match="ended by SIGKILL"):
            reply(model)
        with pytest.raises(ShardLostError, match=rf"^shard 1 \(cpu:1\): {path}: {why}"):
            reply(model)
