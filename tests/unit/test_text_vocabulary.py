"""Vocabularies of files, and those that a server keeps."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from luce.errors import ModelError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.text.vocabulary import KeptVocabularies, Vocabulary

TINY = Path(__file__).parents[2] / "models" / "tiny" / "target.gguf"


def read(kept: KeptVocabularies, path: Path = TINY, **changes: object) -> Vocabulary:
    with open_gguf(path) as file:
        return kept.read(file, replace(spec(path), **changes))  # type: ignore[arg-type]


def spec(path: Path) -> ModelSpec:
    with open_gguf(path) as file:
        return read_spec(Source(str(path), file.metadata, file.tensors))


def test_a_file_that_is_opened_again_has_the_same_vocabulary() -> None:
    kept = KeptVocabularies()
    first = read(kept)
    assert read(kept) is first
    assert first.tokenizer.encode("a text", specials=True)
    assert read(kept, nfc=not spec(TINY).nfc) is not first
    assert read(kept, eos=("a",)) is not first


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path, kept = tmp_path / "model.gguf", KeptVocabularies()
    shutil.copyfile(TINY, path)
    first = read(kept, path)
    os.utime(path, ns=(1, 1))
    second = read(kept, path)
    assert second is not first
    shutil.copyfile(TINY, tmp_path / "other")
    (tmp_path / "other").replace(path)
    os.utime(path, ns=(1, 1))
    assert read(kept, path) is not second


def test_the_vocabulary_that_was_not_read_for_longest_goes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        shutil.copyfile(TINY, path)
    kept = KeptVocabularies(most=2)
    a, b = read(kept, paths[0]), read(kept, paths[1])
    assert read(kept, paths[0]) is a
    read(kept, paths[2])
    assert read(kept, paths[0]) is a
    assert read(kept, paths[1]) is not b


def test_a_vocabulary_larger_than_the_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match="has 3 rows"):
        read(KeptVocabularies(), vocab=3)
