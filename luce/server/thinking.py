"""Whether and how long the model reasons before its reply: what a request asks for in the fields of several APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from luce.config.values import EFFORT_SPELLINGS, EFFORTS
from luce.errors import RequestError
from luce.server.errors import invalid, unsupported
from luce.server.schema import ChatRequest
from luce.text.chat import ChatFormat
from luce.text.effort import BUDGET, EFFORT, NONE, SWITCHES, ReasoningRequest, always_reasons, efforts

# What a field asks for that names no effort.
_ON, _ADAPTIVE = "on", "adaptive"
_ADAPTIVE_EFFORT = "high"
# A budget in the variables of the template, which is Qwen's name of it and that of SGLang's custom_params.
_VARIABLE = f"chat_template_kwargs.{BUDGET}"


class ReasoningSwitch:
    """What a request asks for. Off wins over on, wherever it stands: in `thinking`, `reasoning_effort`, `reasoning`, or
    in the variables of the template. Of several budgets the smallest holds, and every budget wins over an effort. A
    request that says nothing is `unasked`.

    Raises RequestError that names the field if the template has no way to do it.
    """

    def __init__(self, request: ChatRequest, chat: ChatFormat, unasked: ReasoningRequest) -> None:
        self._chat = chat
        #: variables of the template, with those of the request
        self.variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
        asked = _asked(request)
        self._budgets = _budgets(request)
        #: the field that turns reasoning off
        self._off = next((param for param, effort in asked.items() if effort == NONE), None)
        #: what the engine is to do
        self.asked = ReasoningRequest()
        if not (asked or self._budgets or self.variables.keys() & {*SWITCHES, EFFORT}):
            self.asked = unasked
            self.variables = {**unasked.variables(), **self.variables}
            return
        if self._off is not None:
            if always_reasons(chat):
                raise self._always()
            self.asked = ReasoningRequest(effort=NONE)
            self.variables |= self.asked.variables()
            return
        if asked and len(efforts(chat)) == 1:
            if must := [param for param, effort in asked.items() if effort != _ADAPTIVE]:
                raise unsupported(must[0], "this model has no reasoning")
            return
        self.asked = ReasoningRequest(
            effort=_effort(list(asked.values())),
            budget=min(self._budgets.values(), default=None),
            reply_budget=None if request.thinking is None else request.thinking.reply_budget,
            on=bool(asked),
        )
        budget = {} if self.asked.budget is None else {BUDGET: self.asked.budget}
        self.variables = {**self.asked.variables(), **budget, **self.variables}

    def check(self, prompt: Sequence[int]) -> None:
        """Raises RequestError if reasoning is off and the prompt begins it, or if it cannot be limited."""
        if self._off is not None:
            splitter = self._chat.splitter(prompt)
            if splitter is not None and splitter.inside:
                raise self._always()
        elif self._budgets and self._chat.reasoning_tokens(prompt) is None:
            raise unsupported(next(iter(self._budgets)), "this model has no marker that ends its reasoning")

    def _always(self) -> RequestError:
        return unsupported(str(self._off), "the chat template of this model cannot turn its reasoning off")


def _asked(request: ChatRequest) -> dict[str, str]:
    """What each field of a request asks for: an effort, on, or adaptive."""
    reasoning = request.reasoning
    found: dict[str, str] = {}
    if request.reasoning_effort is not None:
        found["reasoning_effort"] = request.reasoning_effort
    if reasoning is not None and reasoning.effort is not None:
        found["reasoning.effort"] = reasoning.effort
    if reasoning is not None and reasoning.enabled is not None:
        found["reasoning.enabled"] = _ON if reasoning.enabled else NONE
    if request.thinking is not None:
        found["thinking.type"] = {"enabled": _ON, "disabled": NONE}.get(request.thinking.type, _ADAPTIVE)
    if reasoning is not None and reasoning.max_tokens is not None:
        found["reasoning.max_tokens"] = _ON
    for name in SWITCHES:
        if (request.chat_template_kwargs or {}).get(name) is False:
            found[f"chat_template_kwargs.{name}"] = NONE
    return {param: EFFORT_SPELLINGS.get(effort, effort) for param, effort in found.items()}


def _effort(asked: Sequence[str]) -> str | None:
    """The effort of a request that does not turn reasoning off."""
    adaptive = _ADAPTIVE_EFFORT if _ADAPTIVE in asked else None
    return next((effort for effort in asked if effort in EFFORTS), adaptive)


def _budgets(request: ChatRequest) -> dict[str, int]:
    """The budget that each field of a request sets; -1 sets none."""
    thinking, reasoning, custom = request.thinking, request.reasoning, request.custom_params
    variable = (request.chat_template_kwargs or {}).get(BUDGET)
    if variable is not None and (type(variable) is not int or not -1 <= variable < 2**31):
        raise invalid(_VARIABLE, "expected a number of tokens, or -1")
    found = {
        "thinking.budget_tokens": None if thinking is None else thinking.budget_tokens,
        "reasoning.max_tokens": None if reasoning is None else reasoning.max_tokens,
        "thinking_token_budget": request.thinking_token_budget,
        "thinking_budget_tokens": request.thinking_budget_tokens,
        "custom_params.thinking_budget": None if custom is None else custom.thinking_budget,
        _VARIABLE: variable,
    }
    return {param: budget for param, budget in found.items() if budget is not None and budget >= 0}
