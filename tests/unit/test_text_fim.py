"""The tokens for filling in the middle, from the keys of a file or the texts of its vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from luce.errors import FormatError
from luce.text.fim import FimTokens
from luce.text.tokenizer import CONTROL, NORMAL, USER_DEFINED, Tokenizer
from tests.support.scripted_model import VOCAB, metadata

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<reponame>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def tokenizer(texts: tuple[str, ...] = (), kind: int = CONTROL, **keys: int) -> Tokenizer:
    """The byte tokenizer with further tokens."""
    base: dict[str, Any] = metadata()
    base["tokenizer.ggml.tokens"] = [*base["tokenizer.ggml.tokens"], *texts]
    base["tokenizer.ggml.token_type"] = [*base["tokenizer.ggml.token_type"], *[kind] * len(texts)]
    return Tokenizer(base | {f"tokenizer.ggml.{name}_token_id": token for name, token in keys.items()})


@pytest.mark.parametrize("texts", [QWEN, STARCODER, DEEPSEEK])
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_texts_of_published_vocabularies(texts: tuple[str, ...], kind: int) -> None:
    assert tokenizer(texts, kind).fim == FimTokens(*range(VOCAB, VOCAB + len(texts)))


def test_keys_win_over_texts() -> None:
    found = tokenizer(QWEN, fim_pre=1, suffix=2, middle=3, fim_mid=4, fim_sep=5).fim
    assert found == FimTokens(1, 2, 4, VOCAB + 3, VOCAB + 4, 5)
    assert found.ends == {VOCAB + 3, VOCAB + 4, 5}
    with pytest.raises(FormatError, match="fim_pre_token_id"):
        tokenizer(fim_pre=VOCAB, fim_suf=0, fim_mid=0)


def test_vocabularies_without_them() -> None:
    assert tokenizer().fim is None
    assert tokenizer(QWEN[:2]).fim is None
    # A word of that spelling is no mark.
    assert tokenizer(QWEN, NORMAL).fim is None
    assert tokenizer(fim_pre=1, fim_suf=2).fim is None
