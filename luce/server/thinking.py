"""Whether the model reasons before its reply: what a request asks for, as variables of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from luce.errors import RequestError
from luce.server.errors import unsupported
from luce.server.schema import ChatRequest
from luce.text.chat import ChatFormat

#: variables by which templates switch reasoning
SWITCHES = ("enable_thinking", "thinking")
#: the variable by which templates set its effort
EFFORT = "reasoning_effort"
#: efforts from the least to the most, in OpenAI's spelling
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SPELLINGS = {"x-high": "xhigh", "extra_high": "xhigh"}
# What a field asks for that names no effort.
_ON, _ADAPTIVE = "on", "adaptive"


def has_switch(chat: ChatFormat) -> bool:
    """Whether the template can turn reasoning on and off."""
    return any(map(chat.reads, SWITCHES))


def efforts(chat: ChatFormat) -> tuple[str, ...]:
    """The efforts that requests to this model may name; to a template that reads none, each but `none` is a hint."""
    on = EFFORTS[1:] if has_switch(chat) or chat.reads(EFFORT) or chat.reasons else ()
    return (*(("none",) if has_switch(chat) or not on else ()), *on)


class ReasoningSwitch:
    """What a request asks for. Off wins over on, wherever it stands: in `thinking`, `reasoning_effort`, `reasoning`, or
    in the variables of the template.

    Raises RequestError that names the field if the template has no way to do it.
    """

    def __init__(self, request: ChatRequest, chat: ChatFormat) -> None:
        self._chat = chat
        #: variables of the template, with those of the request
        self.variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
        _refuse_options(request)
        asked = _asked(request)
        #: the field that turns reasoning off
        self._off = next((param for param, effort in asked.items() if effort == "none"), None)
        if self._off is not None:
            if not has_switch(chat) and (chat.reasons or chat.reads(EFFORT)):
                raise self._always()
            self.variables |= dict.fromkeys(SWITCHES, False)
        elif asked:
            if len(efforts(chat)) > 1:
                effort = next((effort for effort in asked.values() if effort in EFFORTS), None)
                named = {} if effort is None else {EFFORT: effort}
                self.variables = {**dict.fromkeys(SWITCHES, True), **named, **self.variables}
            elif must := [param for param, effort in asked.items() if effort != _ADAPTIVE]:
                raise unsupported(must[0], "this model has no reasoning")

    def check(self, prompt: Sequence[int]) -> None:
        """Raises RequestError if reasoning is off and the prompt begins it."""
        splitter = None if self._off is None else self._chat.splitter(prompt)
        if splitter is not None and splitter.inside:
            raise self._always()

    def _always(self) -> RequestError:
        return unsupported(str(self._off), "the chat template of this model cannot turn its reasoning off")


def _refuse_options(request: ChatRequest) -> None:
    """Refuse what Luce does not do with reasoning."""
    thinking, reasoning = request.thinking, request.reasoning
    for param, value in (
        ("thinking.budget_tokens", thinking and thinking.budget_tokens),
        ("thinking.reply_budget", thinking and thinking.reply_budget),
        ("reasoning.max_tokens", reasoning and reasoning.max_tokens),
    ):
        if value is not None:
            raise unsupported(param, "reasoning cannot be limited to a number of tokens")
    if reasoning is not None and reasoning.exclude:
        raise unsupported("reasoning.exclude", "replies have their reasoning in a field of its own")


def _asked(request: ChatRequest) -> dict[str, str]:
    """What each field of a request asks for: an effort, on, or adaptive."""
    reasoning = request.reasoning
    found: dict[str, str] = {}
    if request.reasoning_effort is not None:
        found["reasoning_effort"] = request.reasoning_effort
    if reasoning is not None and reasoning.effort is not None:
        found["reasoning.effort"] = reasoning.effort
    if reasoning is not None and reasoning.enabled is not None:
        found["reasoning.enabled"] = _ON if reasoning.enabled else "none"
    if request.thinking is not None:
        found["thinking.type"] = {"enabled": _ON, "disabled": "none"}.get(request.thinking.type, _ADAPTIVE)
    for name in SWITCHES:
        if (request.chat_template_kwargs or {}).get(name) is False:
            found[f"chat_template_kwargs.{name}"] = "none"
    return {param: _SPELLINGS.get(effort, effort) for param, effort in found.items()}
