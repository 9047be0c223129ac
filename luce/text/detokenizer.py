"""Ids to text, one id at a time, without ever splitting a character."""

from __future__ import annotations

import codecs

from luce.text.tokenizer import Tokenizer


class Detokenizer:
    """Joins the bytes of tokens into text; control tokens are dropped.

    All pushes and the flush together give exactly `bytes.decode(errors="replace")` of all bytes. The space that
    `Tokenizer.encode` puts before a text and after a special token is removed; with `continues` the ids continue an
    earlier text, so that a space at the start belongs to the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prefixed = tokenizer.space_prefix and not continues

    def push(self, token: int) -> str:
        """The characters that are complete with this token."""
        data = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_special(token):
            self._prefixed = self._tokenizer.space_prefix
        elif self._prefixed and data:
            data = data.removeprefix(b" ")
            self._prefixed = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD for the bytes of an incomplete character, if there is one."""
        return self._decoder.decode(b"", final=True)
