"""How much a model reasons: what its template can switch, efforts, and the budgets that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luce.config.settings import Config, flag
from luce.config.values import EFFORTS
from luce.engine.reasoning_limit import ReasoningLimit
from luce.errors import UsageError
from luce.models.spec import ReasoningBudget
from luce.text.chat import ChatFormat

#: variables by which templates switch reasoning, set its effort, and tell the model its budget
SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
BUDGET = "thinking_budget"
#: the effort without reasoning
NONE = "none"


def has_switch(chat: ChatFormat) -> bool:
    """Whether the template can turn reasoning on and off."""
    return any(map(chat.reads, SWITCHES))


def always_reasons(chat: ChatFormat) -> bool:
    """Whether the model reasons, and its template cannot turn that off."""
    return not has_switch(chat) and (chat.reasons or chat.reads(EFFORT))


def efforts(chat: ChatFormat) -> tuple[str, ...]:
    """The efforts that a model has; where the template reads none, each but `none` stands for its budget."""
    on = EFFORTS if has_switch(chat) or chat.reads(EFFORT) or chat.reasons else ()
    return (*((NONE,) if has_switch(chat) or not on else ()), *on)


def check_default(setting: str, chat: ChatFormat) -> None:
    """Raises UsageError if the model cannot do what `--reasoning` asks for."""
    if setting == "on" and len(efforts(chat)) == 1:
        why = "this model has no reasoning"
    elif setting == "off" and always_reasons(chat):
        why = "the chat template of this model cannot turn its reasoning off"
    else:
        return
    raise UsageError(f"{flag('reasoning')} {setting}: {why}", param="reasoning")


@dataclass(frozen=True)
class ReasoningRequest:
    """What a request asks of the reasoning."""

    #: `none` or one of EFFORTS; None: no effort
    effort: str | None = None
    #: most tokens of the reasoning; None: the effort's
    budget: int | None = None
    #: tokens that the reasoning leaves to the text of the reply; None: the server's
    reply_budget: int | None = None
    #: whether it asks for reasoning
    on: bool = False

    def variables(self) -> dict[str, Any]:
        """What the template gets."""
        if self.effort == NONE:
            return dict.fromkeys(SWITCHES, False)
        named = {} if self.effort is None else {EFFORT: self.effort}
        return {**dict.fromkeys(SWITCHES, True), **named} if self.on or named else {}


@dataclass(frozen=True)
class BudgetEnvelope:
    """Which budgets the reasoning of a model's replies has: what the settings allow, and what the model's makers
    recommend."""

    #: most tokens of any reasoning; None: no limit
    think_max_tokens: int | None
    #: tokens that a limited reasoning leaves to the text of the reply, at most half of the reply's limit
    hard_limit_reply_budget: int
    #: tokens of the reasoning at each of EFFORTS
    effort_tiers: Mapping[str, int]
    #: whether replies reason where a request does not say so: auto (as the template has it), on, off
    default: str = "auto"
    #: most tokens of a chat reply whose request has no limit; None: as many as the context has
    default_max_tokens: int | None = None

    @classmethod
    def of(cls, config: Config, family: ReasoningBudget, context: int) -> BudgetEnvelope:
        """The budgets of a model with this context: those of `config`, else the family's."""
        reply = family.reserved_tokens if config.hard_limit_reply_budget is None else config.hard_limit_reply_budget
        high = max(0, family.usual_tokens - reply)
        most = max(high, family.most_tokens - reply)
        budgets = (high // 8, high // 8, high // 2, high, (high + most) // 2, most)
        usual = _between(dict(family.tiers), dict(zip(EFFORTS, budgets, strict=True)))
        tiers = _between(dict(config.effort), usual)
        largest = context - min(reply, context // 2)
        ceiling = None if config.think_max_tokens < 0 else config.think_max_tokens
        if ceiling is not None:
            largest = min(largest, ceiling)
        limits = {effort: min(budget, largest) for effort, budget in tiers.items()}
        return cls(ceiling, reply, limits, config.reasoning, family.limit)

    @property
    def unasked(self) -> ReasoningRequest:
        """What a request asks for that says nothing about reasoning."""
        return ReasoningRequest(effort=NONE if self.default == "off" else None, on=self.default == "on")

    def limit(
        self, chat: ChatFormat, prompt: Sequence[int], room: int, asked: ReasoningRequest, *, owed: bool = False
    ) -> ReasoningLimit | None:
        """The limit for a reply of at most `room` tokens to a prompt; None if the model marks no reasoning. `owed`: the
        reply is of no use without its text, so that the reasoning gets half of the room if nothing else limits it."""
        budget = self.budget(asked)
        if owed and budget is None:
            budget = room // 2
        reserve = asked.reply_budget
        if reserve is None:
            limited = budget is not None or asked.on
            reserve = min(self.hard_limit_reply_budget, room // 2) if limited else 0
        return chat.reasoning_limit(prompt, budget, reserve)

    def budget(self, asked: ReasoningRequest) -> int | None:
        """Most tokens of the reasoning, however long the reply may be; None: no limit."""
        if asked.effort == NONE:
            return 0
        wanted = asked.budget
        if wanted is None and asked.effort is not None:
            wanted = self.effort_tiers[asked.effort]
        return min((limit for limit in (wanted, self.think_max_tokens) if limit is not None), default=None)


def _between(given: Mapping[str, int], usual: Mapping[str, int]) -> dict[str, int]:
    """The budgets of all efforts: those that are given, and usual ones that are in order with them."""
    found = {}
    for index, effort in enumerate(EFFORTS):
        less = [given[name] for name in EFFORTS[:index] if name in given]
        more = [given[name] for name in EFFORTS[index:] if name in given]
        found[effort] = given.get(effort, max([*less, min([*more, usual[effort]])]))
    return found
