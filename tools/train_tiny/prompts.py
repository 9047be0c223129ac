"""Prompts by task, on which no model here was trained, for measurements of the acceptance of drafted tokens."""

from __future__ import annotations

import json
from pathlib import Path

from .data import Corpus

_ROOT = Path(__file__).resolve().parents[2]
# Characters of a prompt, and of a snippet to be copied: about 120 and 230 tokens.
_LENGTH, _SNIPPET = 400, 700
# Characters of the copy in the prompt.
_GIVEN = 40


def own() -> tuple[str, str]:
    """Luce's own code and documentation, which no package of the corpus contains."""
    code = sorted((_ROOT / "luce").rglob("*.py"))
    text = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
    return "".join(map(Path.read_text, code)), "".join(map(Path.read_text, text))


def held_out(corpus: Corpus) -> tuple[str, str]:
    """The corpus' held-out code and text."""
    code, text = (corpus.tokenizer.decode(ids.tolist()) for ids in (corpus.code, corpus.text))
    return code, text


def _windows(text: str, count: int, length: int) -> list[str]:
    """Parts of a text that begin with a line, evenly spread."""
    places = (text.index("\n", i * (len(text) - 2 * length) // count) + 1 for i in range(count))
    return [text[place : place + length] for place in places]


def make(code: str, text: str, count: int) -> dict[str, list[str]]:
    """`count` prompts in all: four tenths of code, three tenths of text, three tenths of copied snippets."""
    rest = 3 * count // 10
    snippets = [*_windows(code, rest - rest // 2, _SNIPPET), *_windows(text, rest // 2, _SNIPPET)]
    return {
        "code": _windows(code, count - 2 * rest, _LENGTH),
        "text": _windows(text, rest, _LENGTH),
        "copy": [f"\nText:\n{snippet}\nCopy:\n{snippet[:_GIVEN]}" for snippet in snippets],
    }


def write(out: Path, corpus: Corpus | None, count: int) -> None:
    """Write a file for tools/bench_draft.py: of Luce's own files, or of the held-out files of a corpus."""
    prompts = make(*(own() if corpus is None else held_out(corpus)), count)
    out.write_text(json.dumps(prompts, indent=0) + "\n")
