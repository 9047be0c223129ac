"""Which tokens the text of a reply is made of, where its reasoning and its calls have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from luce.engine.events import Token
from luce.text.reply_parser import Part, TextPart


class TextTokens:
    """Gives each text of one reply its tokens, one call for each token and one at the end.

    A token whose text comes later, such as the first bytes of a character, belongs to the text with which it comes.
    Tokens of markers and of white space that no part shows belong to none. `is_control`: of a token id.
    """

    def __init__(self, is_control: Callable[[int], bool]) -> None:
        self._is_control = is_control
        #: tokens that no text has yet
        self._waiting: list[Token] = []

    def of(self, parts: Iterable[Part], token: Token | None, text: str) -> list[Part]:
        """The parts that become certain with a token and its text, or at the reply's end with what was held back."""
        if token is not None and (text or not self._is_control(token.id)):
            self._waiting.append(token)
        found: list[Part] = []
        for part in parts:
            if isinstance(part, TextPart):
                found.append(TextPart(part.text, self._taken(part.text, "" if token is not None else text)))
            else:
                # Only the newest token may have text behind this part.
                self._waiting = self._waiting[-1:] if token is not None else []
                found.append(part)
        if found and not isinstance(found[-1], TextPart):
            self._waiting.clear()
        return found

    def _taken(self, text: str, behind: str) -> tuple[Token, ...]:
        """The waiting tokens that overlap the last place of a text in theirs; `behind`: text that has no token."""
        whole = "".join([token.text for token in self._waiting]) + behind
        begin = max(0, whole.rfind(text))
        taken, left, at = [], [], 0
        for token in self._waiting:
            end = at + len(token.text)
            if at >= begin + len(text):
                left.append(token)
            elif end > begin or at >= begin:
                taken.append(token)
            at = end
        self._waiting = left
        return tuple(taken)
