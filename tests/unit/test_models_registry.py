"""Files that are no model of a family."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import MODEL_ARCH_NAMES, GGUFValueType

from luce.cli.main import main
from luce.models.registry import FAMILIES, MISSING
from tests.support.gguf_files import Key, Tensor, encode, floats


@pytest.mark.parametrize("architecture", ["llama", "unheard-of"])
def test_a_vocabulary_alone_is_told_as_such(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vocab.gguf"
    path.write_bytes(encode([Key("general.architecture", GGUFValueType.STRING, architecture)], []))
    assert main(["inspect", str(path)]) != 0
    assert f"{path}: holds a vocabulary but no tensors: there is no model to run" in capsys.readouterr().err


def test_an_unknown_architecture_is_named_beside_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    tensors = [Tensor("token_embd.weight", (8, 8), data=floats(8, 8))]
    path.write_bytes(encode([Key("general.architecture", GGUFValueType.STRING, "unheard-of")], tensors))
    assert main(["inspect", str(path)]) != 0
    known = ", ".join(sorted(FAMILIES))
    assert f"'unheard-of' is not supported; Luce runs {known}" in " ".join(capsys.readouterr().err.split())


def test_what_is_missing_for_an_architecture_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    tensors = [Tensor("token_embd.weight", (8, 8), data=floats(8, 8))]
    path.write_bytes(encode([Key("general.architecture", GGUFValueType.STRING, "granitehybrid")], tensors))
    assert main(["inspect", str(path)]) == 3
    error = "general.architecture 'granitehybrid' is not supported: Luce has no code for Mamba-2 states"
    assert capsys.readouterr().err == f"luce: {path}: {error}\n"


def test_what_is_missing_concerns_architectures_that_exist_and_do_not_run() -> None:
    # The names that the gguf package gives files of these.
    assert set(MISSING) <= {*MODEL_ARCH_NAMES.values(), "clip"}
    assert not set(MISSING) & set(FAMILIES)
