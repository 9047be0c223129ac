"""Separates reasoning from content in a reply while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from luce.engine.reasoning_limit import ReasoningLimit
from luce.models.channels import Channels
from luce.models.spec import Dialect, Markers
from luce.text.tokenizer import Tokenizer

# Tokens at the end of a prompt without control tokens in which a marker of the template is searched.
_SUFFIX = 16


#: where a reply of channels begins: in front of a header, or inside a message
Place = Literal["header", "reasoning", "content"]


class Delta(NamedTuple):
    """New text of a reply."""

    content: str
    #: it comes before `content`
    reasoning: str = ""


class Splitter(Protocol):
    """Separates the reasoning of one reply from its content. The parts do not depend on the division of the text into
    pieces."""

    @property
    def inside(self) -> bool:
        """Whether the next text belongs to the reasoning, as far as the text so far tells."""
        ...

    def push(self, text: str) -> Delta:
        """The parts that are final after more text."""
        ...

    def flush(self) -> Delta:
        """The text that was held back, at the end of the reply."""
        ...


class ReasoningSplitter(Splitter):
    """Reasoning is the text between the markers at the start of a reply, or up to the closing marker in a reply that
    begins inside. White space around it belongs to neither part. Text is held back only while it may be such white
    space or a part of a marker. The parts do not depend on the division of the text into pieces.

    `call`: a character that ends the reasoning too and is the first of the content, empty for none. A closing marker at
    the start of a reply that does not begin inside belongs to neither part.
    """

    def __init__(self, markers: Markers, *, inside: bool = False, call: str = "") -> None:
        self._markers = markers
        self._call = call
        self._state: Literal["start", "reasoning", "gap", "content"] = "reasoning" if inside else "start"
        self._begun = False
        self._held = ""

    @property
    def inside(self) -> bool:
        """As in Splitter."""
        return self._state == "reasoning"

    def push(self, text: str) -> Delta:
        """As in Splitter."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._state == "start":
            shown = text.lstrip()
            if shown.startswith(self._markers.open):
                self._state, text = "reasoning", shown[len(self._markers.open) :]
            elif shown.startswith(self._markers.close):
                self._state, text = "gap", shown[len(self._markers.close) :]
            elif self._markers.open.startswith(shown) or self._markers.close.startswith(shown):
                self._held = text
                return Delta("")
            else:
                self._state = "content"
        if self._state == "reasoning":
            inner, found, text = self._closed(text)
            reasoning = inner if self._begun else inner.lstrip()
            self._begun = self._begun or bool(reasoning)
            if found:
                self._state, reasoning = "gap", reasoning.rstrip()
            else:
                certain = reasoning[: len(reasoning) - overlap(reasoning, self._markers.close)].rstrip()
                self._held, reasoning = reasoning[len(certain) :], certain
                return Delta("", reasoning)
        if self._state == "gap":
            text = text.lstrip()
            if text:
                self._state = "content"
        return Delta(text, reasoning)

    def _closed(self, text: str) -> tuple[str, bool, str]:
        """The text up to the end of the reasoning, whether it ends, and the text behind it."""
        inner, found, rest = text.partition(self._markers.close)
        before, call, behind = inner.partition(self._call) if self._call else (inner, "", "")
        return (before, True, call + behind + found + rest) if call else (inner, bool(found), rest)

    def flush(self) -> Delta:
        """As in Splitter."""
        text, self._held = self._held, ""
        return Delta("", text.rstrip()) if self._state == "reasoning" else Delta(text)


class ReasoningTokens(NamedTuple):
    """The marker tokens of a model that reasons, and whether the prompt has opened the reasoning."""

    opens: int
    closes: int
    inside: bool
    #: further tokens that end the reasoning, with which calls begin
    calls: frozenset[int] = frozenset()
    #: the channels of which the reply consists, and where it begins: the markers are not enough then to tell its parts
    channels: tuple[Channels, Place] | None = None


def reasoning_tokens(markers: Markers, tokenizer: Tokenizer, prompt: Sequence[int]) -> ReasoningTokens | None:
    """The markers as a reply to a prompt finds them; the prompt may have opened the reasoning already.

    None if the vocabulary lacks one of the markers: the template of such a file has no reasoning.
    """
    (opens, _), (closes, _) = (next(tokenizer.special.cut(text), (None, "")) for text in (markers.open, markers.close))
    if opens is None or closes is None:
        return None
    begin = len(prompt)
    while begin and (prompt[begin - 1] in (opens, closes) or not tokenizer.is_control(prompt[begin - 1])):
        begin -= 1
    # The text behind the last control token is what the reply continues. Without such a token, only its end counts.
    opened = prompt[begin or -_SUFFIX :]
    last = next((token for token in reversed(opened) if token in (opens, closes)), None)
    return ReasoningTokens(opens, closes, last == opens)


# White space that models may write before the marker that opens their reasoning.
_BLANKS = ("\n", "\n\n", "\n\n\n", " ", "  ", "\t", "\r\n")


def reasoning_limit(
    dialect: Dialect, tokenizer: Tokenizer, found: ReasoningTokens, budget: int | None, reply_reserve: int
) -> ReasoningLimit:
    """The limit of the reasoning in a reply whose markers are `found`; `budget`, `reply_reserve` as in
    ReasoningLimit."""
    markers, ending = dialect.reasoning, dialect.budget
    assert markers is not None
    blanks = [tokenizer.encode(text, specials=False, continues=True) for text in _BLANKS]
    return ReasoningLimit(
        opening=tuple(tokenizer.encode(markers.open, specials=True)),
        closers=frozenset({found.closes}),
        closing=tuple(tokenizer.encode(markers.close + ending.lead_out, specials=True)),
        lead_in=tuple(tokenizer.encode(ending.lead_in, specials=False, continues=True)),
        blank=frozenset(ids[0] for ids in blanks if len(ids) == 1),
        inside=found.inside,
        budget=budget,
        reply_reserve=reply_reserve,
    )


def reasoning_splitter(
    markers: Markers, tokenizer: Tokenizer, prompt: Sequence[int], call: str = ""
) -> ReasoningSplitter | None:
    """The splitter of a reply to a prompt; None if the vocabulary lacks one of the markers. `call` as in
    ReasoningSplitter."""
    found = reasoning_tokens(markers, tokenizer, prompt)
    return None if found is None else ReasoningSplitter(markers, inside=found.inside, call=call)


def overlap(text: str, marker: str) -> int:
    """Length of the longest tail of `text` that is a proper prefix of `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
