"""tools/make_reference.py: the files of a recipe, made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.reference import DIRECTORY


def test_a_recipe_gives_the_same_files(tmp_path: Path) -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=f"{package} is an oracle of this test and not installed")
    from tools.make_reference import RECIPES, make

    assert {f"{name}-F32.gguf" for name in RECIPES} <= {path.name for path in DIRECTORY.glob("*.gguf")}
    (tmp_path / "tolerances.json").write_text("{}")
    make("ernie45-a", tmp_path)
    name = "ernie45-a-F32"
    assert (tmp_path / f"{name}.gguf").read_bytes() == (DIRECTORY / f"{name}.gguf").read_bytes()
    with np.load(tmp_path / f"{name}.npz") as made, np.load(DIRECTORY / f"{name}.npz") as kept:
        assert sorted(made) == sorted(kept)
        for key in made:
            # Another processor adds in another order.
            np.testing.assert_allclose(made[key], kept[key], rtol=0, atol=1e-4 * np.abs(kept[key]).max())
