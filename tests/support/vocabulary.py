"""Tokenizers for tests: those of the reference files, and tiny ones made by hand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from luce.gguf.reader import open_gguf

DIRECTORY = Path(__file__).parent.parent / "reference"
NAMES = sorted(path.name.removesuffix(".tokens.json") for path in DIRECTORY.glob("*.tokens.json"))


def cases(name: str) -> dict[str, Any]:
    """The tokenizer and chat cases of a reference model."""
    return json.loads((DIRECTORY / f"{name}.tokens.json").read_text(encoding="utf-8"))


def metadata(name: str) -> dict[str, object]:
    """The tokenizer keys of a reference model."""
    with open_gguf(sorted(DIRECTORY.glob(f"{name}-*.gguf"))[0]) as file:
        return {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}


def nfc(name: str) -> bool:
    """The Qwen families compose text first."""
    return name.startswith("qwen")


@functools.cache
def spelling() -> dict[int, str]:
    """GPT-2's printable spelling of each byte, as its paper's code defines it."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table, shifted = {byte: chr(byte) for byte in kept}, 256
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(shifted)
            shifted += 1
    return table


def byte_level(
    merges: tuple[str, ...] = (), *, control: tuple[str, ...] = (), visible: tuple[str, ...] = (), **keys: object
) -> dict[str, object]:
    """A gpt2 vocabulary: ids 0..255 are the bytes, then the results of `merges`, then the special tokens."""
    spelled = spelling()
    tokens = [spelled[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in merges]
    types = [1] * len(tokens) + [3] * len(control) + [4] * len(visible)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *control, *visible],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(merges),
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def sentencepiece(pieces: dict[str, float], *, control: tuple[str, ...] = (), **keys: object) -> dict[str, object]:
    """A llama vocabulary: 0 <unk>, then the control tokens, 256 byte tokens, then pieces with their scores."""
    tokens = ["<unk>", *control, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2] + [3] * len(control) + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - len(pieces)) + list(pieces.values()),
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }
