"""The text of a reply: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from luce.engine.events import TextOutput, Texts
from luce.text.detokenizer import Detokenizer
from luce.text.reasoning import overlap
from luce.text.tokenizer import Tokenizer


class ReplyText(TextOutput):
    """The text of one reply. Text is held back only while its tail is a proper prefix of a stop string.

    The stop string that is complete first ends the reply (the longest of several that end together), and the text is
    cut before it. So the result does not depend on the division of the text into tokens. At the end, `remember` gets
    the ids and returns their texts.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], remember: Callable[[Sequence[int]], Texts] | None = None
    ) -> None:
        self._remember = remember
        self._texts: Texts = ()
        self._ids: list[int] = []
        self._detokenizer = Detokenizer(tokenizer, continues=True)
        self._stops = tuple(stops)
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that was reached, if any."""
        return self._stopped

    @property
    def texts(self) -> Texts:
        """As in TextOutput."""
        return self._texts

    def push(self, token: int) -> str:
        """The text that is final after one more token; empty once a stop string was reached."""
        self._ids.append(token)
        return self._release(self._detokenizer.push(token))

    def flush(self) -> str:
        """The text that was held back; incomplete characters become U+FFFD. Empty if a stop string was reached."""
        if self._remember is not None:
            self._texts = self._remember(self._ids)
        text = self._release(self._detokenizer.flush()) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self._stopped is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._stopped = min(found)
            self._held = ""
            return text[:at]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
