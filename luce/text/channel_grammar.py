"""The grammar of a reply of several channels around its body or its calls."""

from __future__ import annotations

from luce.models.channels import Channels
from luce.text.lark import ANY, Cut, Rules
from luce.text.reasoning import Place

_TEXT = f"/{ANY}*/"


class ChannelRules:
    """Pieces of grammar for a reply that begins at `place`. One message of the reasoning may come in front of what must
    come; in free text there may be several. `cut` divides a text into special tokens and the text between."""

    def __init__(self, channels: Channels, place: Place, cut: Cut) -> None:
        literal = Rules(cut).literal
        end = literal(channels.ends[0])
        following = f"{end} {literal(channels.start + channels.role)}"
        reasoning, preamble, final = (
            literal(channels.channel + name + channels.message)
            for name in (channels.reasoning, channels.preamble, channels.final)
        )
        message = f"{reasoning} {_TEXT} {following}"
        self._before = "" if place == "header" else f"{_TEXT} {following} "
        #: the reply goes on with the text of the answer
        self.goes_on = place == "content"
        self._last = f"{final} {_TEXT} ({end})? | {preamble} {_TEXT} ({end})?"
        self._earlier = f"({message} | {preamble} {_TEXT} {following})* "
        self._end = end
        #: what stands in front of calls that must come
        self.calls = self._before if place == "reasoning" else f"{self._before}({message})? "
        #: what stands in front of the body
        self.body = "" if place == "content" else f"{self.calls}{final} "

    def free(self, call: str) -> str:
        """A reply of text that may end with a call."""
        whole = f"{self._before}{self._earlier}({self._last} | {call})"
        return f"{_TEXT} ({self._end})? | {whole}" if self.goes_on else whole
