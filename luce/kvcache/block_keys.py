"""Keys of a prompt's blocks, by which a router compares prompts with what replicas have cached, without a token.

The key of a block is SHA-256(key of the block before it + the block), so it stands for everything up to its end. A
block is TOKENS tokens as int64, as luce.kvcache.prefix_tree has them, or CHARACTERS characters of a text
whose tokens are not known. Only the standard library is imported: a router has no NumPy.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

#: tokens of a block: a page of the prefix cache
TOKENS = 64
#: characters of a block of text
CHARACTERS = 256


def next_key(key: bytes, block: bytes) -> bytes:
    """The key of a block behind the one with `key`, b"" for the first."""
    return hashlib.sha256(key + block).digest()


def token_keys(ids: Sequence[int]) -> list[bytes]:
    """The keys of the whole blocks of a prompt."""
    data, size = array("q", ids).tobytes(), TOKENS * 8
    return _chain(data[begin : begin + size] for begin in range(0, len(data) - size + 1, size))


def text_keys(text: str) -> list[bytes]:
    """The keys of the whole blocks of a text. Never equal to those of tokens: a block begins with a mark."""
    whole = len(text) // CHARACTERS * CHARACTERS
    blocks = (text[begin : begin + CHARACTERS] for begin in range(0, whole, CHARACTERS))
    return _chain(b"text" + block.encode(errors="surrogatepass") for block in blocks)


def salted(key: bytes, salt: bytes) -> bytes:
    """What others see of a key. Who has another salt cannot tell whether the block is cached."""
    return hashlib.sha256(salt + key).digest()


def _chain(blocks: Iterable[bytes]) -> list[bytes]:
    keys, key = [], b""
    for block in blocks:
        key = next_key(key, block)
        keys.append(key)
    return keys
