"""The text of a reply: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from luce.engine.events import TextOutput, Texts
from luce.text.detokenizer import Detokenizer
from luce.text.marks import Marks
from luce.text.reasoning import overlap
from luce.text.tokenizer import Tokenizer


class ReplyText(TextOutput):
    """The text of one reply. Text is held back only while its tail is a proper prefix of a stop string.

    The stop string that is complete first ends the reply (the longest of several that end together), and the text is
    cut before it. So the result does not depend on the division of the text into tokens. At the end, `remember` gets
    the ids and returns their texts.

    `marks`: the special tokens of the dialect are marks in the text; a stop string is found in their spelling too, but
    not in the headers of messages.
    `complete` gets the text piece by piece; once it returns True, the reply ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        remember: Callable[[Sequence[int]], Texts] | None = None,
        *,
        marks: Marks | None = None,
        complete: Callable[[str], bool] | None = None,
    ) -> None:
        self._remember = remember
        self._texts: Texts = ()
        self._ids: list[int] = []
        self._detokenizer = Detokenizer(tokenizer, continues=True)
        self._stops = tuple(stops)
        self._marks = marks
        self._complete = complete
        self._held = ""
        self._in_header = False
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """As in TextOutput."""
        return self._stopped

    @property
    def texts(self) -> Texts:
        """As in TextOutput."""
        return self._texts

    def push(self, token: int) -> str:
        """The text that is final after one more token; empty once a stop string was reached."""
        self._ids.append(token)
        mark = None if self._marks is None else self._marks.of_token.get(token)
        if mark is None:
            text = self._detokenizer.push(token)
            return self._given(text) if self._in_header else self._release(text)
        # The bytes before it are no character. The token has no text of its own, or its spelling.
        text = self._detokenizer.flush()
        self._detokenizer.push(token)
        channels = None if self._marks is None else self._marks.channels
        if channels is not None and mark in (channels.start, channels.channel):
            # No stop string goes on in a header.
            text = self._release(text)
            text += self._given(self._held)
            self._held, self._in_header = "", True
            return text + self._given(mark)
        if channels is not None and self._in_header:
            self._in_header = mark not in (channels.message, *channels.ends)
            return self._given(text + mark)
        return self._release(text + mark)

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
        spelled = text if self._marks is None else self._marks.spelled(text)
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := spelled.find(stop)) >= 0]
        if found:
            _, at, self._stopped = min(found)
            self._held = ""
            return self._first(text, at)[0]
        held = max((overlap(spelled, stop) for stop in self._stops), default=0)
        text, self._held = self._first(text, len(spelled) - held, whole=True)
        return self._given(text)

    def _given(self, text: str) -> str:
        """A text that is final; empty once a stop string was reached, or the reply is complete."""
        if self._stopped is not None:
            return ""
        if self._complete is not None and text and self._complete(text):
            self._stopped, self._held = "", ""
        return text

    def _first(self, text: str, length: int, *, whole: bool = False) -> tuple[str, str]:
        """A marked text cut behind `length` characters of its spelling; within a mark, `whole` keeps it in the rest,
        and otherwise its spelling is cut."""
        if self._marks is None:
            return text[:length], text[length:]
        for end, char in enumerate(text):
            spelling = self._marks.spelled(char)
            if length < len(spelling):
                return text[:end] + ("" if whole else spelling[:length]), text[end:]
            length -= len(spelling)
        return text, ""
