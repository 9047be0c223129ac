"""Fill in the middle: the tokens by which code models are told what is before and behind a gap, and its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from luce.text.prompt_limit import PromptLimit

# Of each token the names of `tokenizer.ggml.NAME_token_id`, and the texts of published vocabularies without the key.
_TOKENS = {
    "prefix": (
        ("fim_pre", "prefix"),
        ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
    ),
    "suffix": (
        ("fim_suf", "suffix"),
        ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
    ),
    "middle": (
        ("fim_mid", "middle"),
        ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
    ),
    "pad": (("fim_pad",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>")),
    "repository": (("fim_rep",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    "file": (("fim_sep",), ("<|file_sep|>",)),
}
# llama.cpp's names, which models have seen as little as any other: the request has none.
_REPOSITORY, _FILE = "myproject\n", "filename\n"
# Between the further texts of a model without a token for files.
_SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True)
class FimTokens:
    """The ids of a vocabulary."""

    prefix: int
    suffix: int
    middle: int
    pad: int | None = None
    repository: int | None = None
    file: int | None = None

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end what fills a gap."""
        return frozenset(token for token in (self.pad, self.repository, self.file) if token is not None)


def fim_tokens(named: Callable[[str], int | None], special: Mapping[str, int]) -> FimTokens | None:
    """The tokens of a vocabulary, None if it lacks one of the first three. `named` has the ids of the file's keys,
    `special` those of the texts of control and user-defined tokens."""
    found: dict[str, int | None] = {}
    for part, (names, texts) in _TOKENS.items():
        ids = (*map(named, names), *map(special.get, texts))
        found[part] = next((token for token in ids if token is not None), None)
    prefix, suffix, middle = (found.pop(part) for part in ("prefix", "suffix", "middle"))
    if prefix is None or suffix is None or middle is None:
        return None
    return FimTokens(prefix, suffix, middle, **found)


class Encoder(Protocol):
    """What this module needs of a tokenizer."""

    def encode(self, text: str, *, specials: bool, limit: PromptLimit, before: int) -> list[int]:
        """The ids of a text."""

    def refuse_long(self, text: str, limit: PromptLimit) -> None:
        """Raises ContextError for a text that cannot have few enough tokens."""


@dataclass(frozen=True)
class Gap:
    """What a model is to fill."""

    #: the text before the gap, as a text or as ids
    prefix: str | list[int]
    suffix: str
    #: further files: name and text
    files: tuple[tuple[str, str], ...] = ()


def fim_prompt(gap: Gap, fim: FimTokens, tokenizer: Encoder, limit: PromptLimit) -> list[int]:
    """The ids of the prompt, without BOS: `REPOSITORY name FILE name text ... PREFIX before SUFFIX behind MIDDLE`
    (Qwen2.5-Coder, arXiv 2409.12186), the further files only if there are some. No text becomes a control token.

    Raises what `limit` raises.
    """
    ids: list[int] = []

    def add(text: str) -> None:
        tokenizer.refuse_long(text, limit)
        ids.extend(tokenizer.encode(text, specials=False, limit=limit, before=len(ids)))

    if gap.files:
        if fim.repository is not None:
            ids.append(fim.repository)
            add(_REPOSITORY)
        for name, text in gap.files:
            if fim.file is None:
                add(_SNIPPET)
            else:
                ids.append(fim.file)
                add(name + "\n")
            add(text)
        if fim.file is not None:
            ids.append(fim.file)
            add(_FILE)
    ids.append(fim.prefix)
    if isinstance(gap.prefix, str):
        add(gap.prefix)
    else:
        ids += gap.prefix
    ids.append(fim.suffix)
    add(gap.suffix)
    return [*ids, fim.middle]
