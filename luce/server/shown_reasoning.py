"""Where a chat reply shows its reasoning: in a field of its own, in its text, or nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from luce.models.spec import Markers
from luce.server.schema import ChatRequest
from luce.text.reply_parser import CallStarted, Part, ReasoningPart, TextPart

ReasoningFormat = Literal["separate", "inline", "drop"]

#: the formats by their names and by llama.cpp's
_FORMATS: dict[str, ReasoningFormat] = {
    "separate": "separate",
    "inline": "inline",
    "drop": "drop",
    "auto": "separate",
    "deepseek": "separate",
    "none": "inline",
}


def reasoning_format(request: ChatRequest, default: str) -> ReasoningFormat:
    """The format that a request asks for, in the spellings of OpenRouter, llama.cpp and SGLang; else the default."""
    if request.include_reasoning is False or (request.reasoning is not None and request.reasoning.exclude):
        return "drop"
    name = default if request.reasoning_format is None else request.reasoning_format
    if request.reasoning_format is None and request.separate_reasoning is not None:
        name = "separate" if request.separate_reasoning else "inline"
    return _FORMATS[name]


class ShownReasoning:
    """Makes the parts of a reply those that its format shows, in order. `markers`: the model's; None: it has none."""

    def __init__(self, format: ReasoningFormat, markers: Markers | None) -> None:
        self._format = format
        self._open, self._close = ("", "") if markers is None else (markers.open.strip(), markers.close.strip())
        self._inside = False

    def of(self, parts: Iterable[Part]) -> list[Part]:
        """The shown parts for further ones. Reasoning that was cut off has no closing marker."""
        if self._format == "separate":
            return list(parts)
        if self._format == "drop":
            return [part for part in parts if not isinstance(part, ReasoningPart)]
        return list(self._inline(parts))

    def _inline(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, ReasoningPart):
                yield TextPart(part.text if self._inside else f"{self._open}\n{part.text}")
                self._inside = True
            elif self._inside and isinstance(part, TextPart | CallStarted):
                self._inside = False
                yield TextPart(f"\n{self._close}\n\n")
                yield part
            else:
                yield part
