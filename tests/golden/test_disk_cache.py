"""Every reference file across restarts: what a sequence resumed from the disk says is what the whole one says."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tests.support.covering import each_kind
from tests.support.disk_models import ask, load, saved
from tests.support.reference import Reference


@each_kind()
def test_greedy_after_a_restart(reference: Reference, tmp_path: Path) -> None:
    prompt, expected = (reference.expected[f"{key}_long"].tolist() for key in ("prompt", "greedy"))
    with load(reference.path, tmp_path) as model:
        assert ask(model, prompt, 10) == (expected[:10], 0, "none")
    with load(reference.path, tmp_path) as model:
        assert ask(model, prompt, 32) == (expected, saved(model, prompt), "disk")
        assert ask(model, prompt, 32) == (expected, len(prompt), "ram")
    # And behind the reply of the first run, whose snapshot continues that of the prompt.
    with load(reference.path, tmp_path) as model:
        assert ask(model, [*prompt, *expected[:10]], 22) == (expected[10:], len(prompt) + 9, "disk")


def test_a_copy_of_the_file_is_the_same_model_and_another_file_is_not(tmp_path: Path) -> None:
    reference, other = Reference("qwen35-a-F32"), tmp_path / "other.gguf"
    prompt = reference.expected["prompt_long"].tolist()
    shutil.copy(reference.path, other)
    with load(reference.path, tmp_path / "cache") as model:
        expected = ask(model, prompt, 4)[0]
    with load(other, tmp_path / "cache") as model:
        # The bytes of an unknown file are read first, behind the scenes.
        assert model.engine.cache is not None and model.engine.cache.disk is not None
        while model.engine.cache.disk.store is None:
            time.sleep(0.01)
        assert ask(model, prompt, 4) == (expected, saved(model, prompt), "disk")
    data = bytearray(other.read_bytes())
    data[-5] ^= 1
    other.write_bytes(data)
    with load(other, tmp_path / "cache") as model:
        assert ask(model, prompt, 1)[1:] == (0, "none")
    with load(Reference("qwen35-a-Q8_0").path, tmp_path / "cache") as model:
        assert ask(model, prompt, 1)[1:] == (0, "none")
