"""The vocabulary of a model's file, and the vocabularies that a server keeps for models that it loads again."""

from __future__ import annotations

from typing import NamedTuple

from luce.errors import ModelError
from luce.gguf.reader import GGUFFile
from luce.models.spec import ModelSpec
from luce.text.grammar_library import GrammarLibrary
from luce.text.tokenizer import Tokenizer

# One of 248,320 tokens takes 0.1 GB, and 2.3 s to read with its grammars on two cores, 1 s of it for the tokenizer.
_KEPT = 4


class Vocabulary(NamedTuple):
    """What is made of a file's vocabulary alone."""

    tokenizer: Tokenizer
    #: reads the tokenizer at the first grammar
    grammars: GrammarLibrary

    @classmethod
    def read(cls, file: GGUFFile, spec: ModelSpec) -> Vocabulary:
        """The vocabulary of a file. Raises ModelError for more tokens than the embedding has rows, and the Tokenizer's
        errors."""
        tokenizer = Tokenizer(file.metadata, nfc=spec.nfc, eos_texts=spec.eos)
        if tokenizer.vocab > spec.vocab:
            raise ModelError(
                f"{file.paths[0]}: {tokenizer.vocab} tokens, but tensor token_embd.weight has {spec.vocab} rows"
            )
        return cls(tokenizer, GrammarLibrary(tokenizer))


class KeptVocabularies:
    """The vocabularies of the files that were opened last. Models are loaded one at a time, so nothing is locked."""

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
        self._kept: dict[object, Vocabulary] = {}

    def read(self, file: GGUFFile, spec: ModelSpec) -> Vocabulary:
        """As Vocabulary.read; the same object as long as the file is the same and has not changed."""
        key = tuple(part.identity for part in file.files), spec.nfc, tuple(spec.eos), spec.vocab
        found = self._kept.pop(key, None) or Vocabulary.read(file, spec)
        self._kept[key] = found
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return found
