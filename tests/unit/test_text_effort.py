"""Efforts stand for budgets: those of the settings, else the family's."""

from __future__ import annotations

from typing import Any

import pytest

from luce.config.settings import Config
from luce.errors import UsageError
from luce.models.spec import Dialect, Markers, ReasoningBudget
from luce.text.chat import ChatFormat
from luce.text.effort import BudgetEnvelope, ReasoningRequest, check_default
from luce.text.template import ChatTemplate
from luce.text.tokenizer import Tokenizer
from tests.support.vocabulary import byte_level

#: as Qwen3.6's makers recommend
FAMILY = ReasoningBudget(usual_tokens=32768, most_tokens=81920)
LONG = 1 << 20


def tiers(context: int = LONG, family: ReasoningBudget = FAMILY, **settings: Any) -> tuple[int, ...]:
    return tuple(BudgetEnvelope.of(Config(**settings), family, context).effort_tiers.values())


def test_budgets_follow_from_the_lengths_of_replies() -> None:
    # 32768 - 4096 and 81920 - 4096, and what lies between.
    assert tiers() == (3584, 3584, 14336, 28672, 53248, 77824)
    assert tiers(family=ReasoningBudget()) == (1488, 1488, 5952, 11904, 11904, 11904)
    assert tiers(hard_limit_reply_budget=768) == (4000, 4000, 16000, 32000, 56576, 81152)
    assert tiers(hard_limit_reply_budget=99999) == (0,) * 6


def test_no_budget_exceeds_the_context_or_the_server_s_limit() -> None:
    assert tiers(32768) == (3584, 3584, 14336, 28672, 28672, 28672)
    # A reply has at least half of a short context.
    assert tiers(4000) == (2000,) * 6
    assert tiers(think_max_tokens=5000) == (3584, 3584, 5000, 5000, 5000, 5000)
    assert tiers(think_max_tokens=0) == (0,) * 6


def test_settings_name_budgets_and_the_others_stay_in_order() -> None:
    assert tiers(effort=(("low", 1), ("high", 20))) == (1, 1, 20, 20, 53248, 77824)
    assert tiers(effort=(("medium", 60000),)) == (3584, 3584, 60000, 60000, 60000, 77824)
    assert tiers(effort=(("max", 9),)) == (9,) * 6


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        (ReasoningRequest(), None),
        (ReasoningRequest(on=True), None),
        (ReasoningRequest(effort="none", budget=7), 0),
        (ReasoningRequest(effort="low"), 3584),
        (ReasoningRequest(effort="low", budget=9000), 9000),
        (ReasoningRequest(effort="max", budget=0), 0),
    ],
)
def test_a_budget_wins_over_an_effort(asked: ReasoningRequest, budget: int | None) -> None:
    assert BudgetEnvelope.of(Config(), FAMILY, LONG).budget(asked) == budget
    ceiling = BudgetEnvelope.of(Config(think_max_tokens=100), FAMILY, LONG).budget(asked)
    assert ceiling == (100 if budget is None else min(100, budget))


def test_variables_of_the_template() -> None:
    assert ReasoningRequest(budget=3).variables() == {}
    assert ReasoningRequest(effort="none").variables() == {"enable_thinking": False, "thinking": False}
    assert ReasoningRequest(on=True).variables() == {"enable_thinking": True, "thinking": True}
    low = {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}
    assert ReasoningRequest(effort="low").variables() == low


@pytest.mark.parametrize(
    ("source", "reasons", "on", "off"),
    [
        ("{{ enable_thinking }}", True, "", ""),
        ("<think>", True, "", "the chat template of this model cannot turn its reasoning off"),
        ("{{ reasoning_effort }}", False, "", "the chat template of this model cannot turn its reasoning off"),
        ("{{ messages }}", False, "this model has no reasoning", ""),
    ],
)
def test_a_server_reasons_by_default_only_as_its_model_can(source: str, reasons: bool, on: str, off: str) -> None:
    template = ChatTemplate(source)
    dialect = Dialect(Markers("<think>", "</think>")) if reasons else Dialect()
    chat = ChatFormat(template, Tokenizer(byte_level(visible=("<think>", "</think>"))), dialect)
    check_default("auto", chat)
    for setting, why in (("on", on), ("off", off)):
        if not why:
            check_default(setting, chat)
            continue
        with pytest.raises(UsageError) as caught:
            check_default(setting, chat)
        assert str(caught.value) == f"--reasoning {setting}: {why}" and caught.value.param == "reasoning"
    template.close()


def test_the_default_asks_for_what_a_request_could_ask_for() -> None:
    found = {mode: BudgetEnvelope.of(Config(reasoning=mode), FAMILY, LONG).unasked for mode in ("auto", "on", "off")}
    assert found == {"auto": ReasoningRequest(), "on": ReasoningRequest(on=True), "off": ReasoningRequest("none")}
