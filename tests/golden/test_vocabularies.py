"""The vocabularies that llama.cpp tests its tokenizer with, and its cases: `ggml-vocab-NAME.gguf` with `.inp` and
`.out`, in the folder that LUCE_TEST_VOCABULARIES names (CONTRIBUTING.md says where they come from)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from luce.errors import UnsupportedError
from luce.gguf.reader import open_gguf
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.text.tokenizer import Tokenizer

if "LUCE_TEST_VOCABULARIES" not in os.environ:
    pytest.skip("LUCE_TEST_VOCABULARIES names no folder of vocabularies", allow_module_level=True)
FILES = sorted(Path(os.environ["LUCE_TEST_VOCABULARIES"]).glob("ggml-vocab-*.gguf"))
WITH_CASES = [path for path in FILES if path.with_name(f"{path.name}.inp").exists()]
#: of families that Luce does not run
UNKNOWN = {"bert-bge", "falcon", "mpt"}


def name_of(path: Path) -> str:
    return path.stem.removeprefix("ggml-vocab-")


def test_the_folder_has_the_vocabularies() -> None:
    assert {"llama-bpe", "llama-spm", "qwen35", "gemma-4", "deepseek-llm"} <= set(map(name_of, WITH_CASES))


@pytest.mark.parametrize("path", WITH_CASES, ids=name_of)
def test_cases_have_the_ids_of_llama_cpp(path: Path) -> None:
    with open_gguf(path) as file:
        if name_of(path) in UNKNOWN:
            with pytest.raises(UnsupportedError, match="unknown"):
                Tokenizer(file.metadata)
            return
        tokenizer = Tokenizer(file.metadata)
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(f"{path.name}.out").read_text().split("\n")
    # The last text is empty, and some files lack it.
    assert len(texts) > 40 and len(lines) - len(texts) in (0, 1)
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text, specials=False) == list(map(int, line.split())), text


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_vocabulary_is_no_model(path: Path) -> None:
    with open_gguf(path) as file, pytest.raises(UnsupportedError) as caught:
        read_spec(Source(str(path), file.metadata, file.tensors))
    assert str(caught.value) == f"{path}: holds a vocabulary but no tensors: there is no model to run"
