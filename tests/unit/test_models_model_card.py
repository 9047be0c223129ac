"""Model cards: which one is about a file, which values count, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import luce
from luce.cli.main import main
from luce.config.sampling import SAMPLERS
from luce.config.settings import Config
from luce.errors import UsageError
from luce.gguf.reader import open_gguf
from luce.models.model_card import ModelCard, card_names, find_card, recommended
from luce.models.spec import Dialect, Markers, ModelSpec
from luce.text.effort import BudgetEnvelope
from tests.support.gguf_files import write_recommending
from tests.support.reference import Reference

TINY = Reference("qwen3-a-F32").path
SPEC = ModelSpec("f", 1, 1, 1 << 20, 1e-6, (), tied_head=True, dialect=Dialect(Markers("<think>", "</think>")))
FULL = {
    "name": "Big One",
    "source": "https://example.com/big",
    "verified_at": "2026-01-31",
    "max_tokens": 1000,
    "complex_problem_max_tokens": 3000,
    "hard_limit_reply_budget": 300,
    "thinking_marker": "<think>",
    "thinking_terminator_hint": "Enough.\n</think>\n\n",
    "download_urls": {"Q4_K_M": "https://example.com/big.gguf"},
    "sampling": {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 9,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "repetition_penalty": 1.1,
    },
    "reasoning_effort_tiers": {"low": 10, "medium": 20, "high": 30, "x-high": 40, "max": 50},
    "notes": "x",
}
Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Writes a file without layers: metadata by gguf-py's names, as keywords."""

    def make(file: str = "m.gguf", **values: Any) -> Path:
        return write_recommending(tmp_path / file, **values)

    return make


def card(path: Path, folder: Path | None = None) -> ModelCard | None:
    with open_gguf(path) as file:
        return find_card(folder, file)


def folder(tmp_path: Path, **cards: Any) -> Path:
    place = tmp_path / "cards"
    place.mkdir(exist_ok=True)
    for name, content in cards.items():
        (place / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return place


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"file": "Some_Model-Q4_K_M.gguf", "name": "Big\tOne_2 (x)"}, ("big-one-2-x", "some-model")),
        ({"basename": "Big", "size_label": "4B"}, ("big-4b", "m")),
        ({"basename": "Big", "size_label": "4B", "finetune": "it"}, ("big-4b-it", "big-4b", "m")),
        ({"basename": "Big", "size_label": "4B", "finetune": "abliterated"}, ("m",)),
        ({"basename": "Big", "size_label": "4B", "version": "2507"}, ("m",)),
        ({"file": "a-3.1-UD-IQ2_XXS.gguf"}, ("a-3.1",)),
        ({"file": "a.BF16.gguf"}, ("a",)),
        ({"file": "q4-talk.gguf"}, ("q4-talk",)),
    ],
)
def test_names_of_the_cards_of_a_file(values: dict[str, Any], names: tuple[str, ...], made: Made) -> None:
    with open_gguf(made(**values)) as file:
        assert card_names(file) == names


def test_a_card_of_the_user_wins(made: Made, tmp_path: Path) -> None:
    path = made("other.gguf", name="Qwen3 4B")
    found = card(path)
    assert found is not None and found.origin == "packaged: qwen3-4b.json"
    mine = folder(tmp_path, other=FULL, _schema={"type": "object"})
    found = card(path, mine)
    assert found is not None and (found.name, found.origin) == ("Big One", "user: other.json")
    assert card(made("nobody.gguf"), mine) is None


def test_every_key_counts(made: Made, tmp_path: Path) -> None:
    path = made("big.gguf", sampling_temp=1.9, sampling_top_k=99)
    with open_gguf(path) as file:
        own = recommended(Config(), file, SPEC, None)
        assert (own.source, own.config.temperature, own.config.top_k, own.spec) == ("gguf", 1.9, 99, SPEC)
        found = find_card(folder(tmp_path, big=FULL), file)
        advice = recommended(Config(top_k=0, effort=(("high", 35),)), file, SPEC, found)
    assert advice.source == "user: big.json"
    sampling = {name: getattr(advice.config, name) for name in FULL["sampling"]}  # type: ignore[attr-defined]
    assert sampling == {**FULL["sampling"], "top_k": 0}  # type: ignore[dict-item]
    budget = advice.spec.dialect.budget
    assert (budget.lead_in, budget.lead_out) == ("Enough.\n", "\n\n")
    envelope = BudgetEnvelope.of(advice.config, budget, 1 << 20)
    assert (envelope.default_max_tokens, envelope.hard_limit_reply_budget) == (1000, 300)
    assert dict(envelope.effort_tiers) == {"minimal": 10, "low": 10, "medium": 20, "high": 35, "xhigh": 40, "max": 50}
    assert BudgetEnvelope.of(Config(hard_limit_reply_budget=5), budget, 1 << 20).hard_limit_reply_budget == 5
    plain = dataclasses.replace(budget, tiers=())
    # 1000 - 300 and 3000 - 300, and what lies between.
    assert tuple(BudgetEnvelope.of(Config(), plain, 1 << 20).effort_tiers.values()) == (87, 87, 350, 700, 1700, 2700)


def test_numbers_outside_their_range_are_left_out(made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = {
        **FULL,
        "max_tokens": 0,
        "hard_limit_reply_budget": 255,
        "thinking_terminator_hint": "Enough.",
        "sampling": {"temperature": 2.5, "top_k": 1.5, "top_p": 0.5},
        "reasoning_effort_tiers": {"low": -1, "high": 7},
    }
    with open_gguf(made("big.gguf")) as file:
        found = find_card(folder(tmp_path, big=wrong), file)
        advice = recommended(Config(), file, SPEC, found)
    assert found is not None
    assert (found.sampling, found.tiers, found.max_tokens) == ({"top_p": 0.5}, {"high": 7}, None)
    assert advice.spec.dialect.budget.reserved_tokens == 4096
    assert caplog.messages == [
        "user: big.json: sampling.temperature is left out: expected a number in [0, 2], got 2.5",
        *[line for line in caplog.messages if "sampling.top_k is left out" in line],
        "user: big.json: reasoning_effort_tiers.low is left out: expected 0 at least, got -1",
        "user: big.json: max_tokens is left out: expected 1 at least, got 0",
        "user: big.json: hard_limit_reply_budget is left out: expected 256 at least, got 255",
        "user: big.json: thinking_terminator_hint is left out: it has no '</think>'",
    ]
    assert len(caplog.messages) == 6


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({**FULL, "temprature": 1}, "unknown field `temprature`"),
        ({**FULL, "sampling": {"top_x": 1}}, "sampling has an unknown key `top_x`"),
        ({**FULL, "reasoning_effort_tiers": {"most": 1}}, "Invalid enum value 'most'"),
        ({**FULL, "max_tokens": "9"}, r"`\$.max_tokens`"),
        ({**FULL, "verified_at": "soon"}, r"`\$.verified_at`"),
        ({"name": "x", "verified_at": "2026-01-31"}, "required field `source`"),
        ("{", "truncated"),
        ('"\\ud800"', "user"),
    ],
)
def test_a_wrong_card_is_refused_whatever_the_model(content: Any, why: str, made: Made, tmp_path: Path) -> None:
    place = folder(tmp_path, other=content)
    with pytest.raises(UsageError, match=why if why != "user" else "other.json") as caught:
        card(made(), place)
    assert str(caught.value).startswith(f"--model-cards: {place}/other.json: ")
    assert (caught.value.param, caught.value.exit_code) == ("model_cards", 2)


def test_a_loaded_model_takes_a_changed_card(tmp_path: Path) -> None:
    with open_gguf(TINY) as file:
        name = card_names(file)[0]
    place = folder(tmp_path, **{name: FULL})
    common: dict[str, Any] = {"max_ctx": 64, "kv_cache_dir": "off", "target_device": "cpu:0", "model_cards": place}
    with luce.load(TINY, **common, top_p=0.25) as model:
        assert model.read_card() is None
        changed = {"sampling": {"temperature": 1.5}, "max_tokens": 500, "thinking_terminator_hint": "Now.</think>"}
        folder(tmp_path, **{name: {**FULL, **changed}})
        found = model.read_card()
        assert found is not None and model.config.temperature == 0.5
        model.take_card(found)
        config = model.config
        # What the card no longer says is that of the server again; what the user has set stays.
        assert (config.temperature, config.top_k, config.top_p) == (1.5, None, 0.25)
        limit = model.chat.reasoning_limit([], 5, 0)
        assert limit is not None and model.detokenize(limit.lead_in) == "Now."
        assert model.envelope.default_max_tokens == 500 and config.target_device == "cpu:0"
        (place / f"{name}.json").unlink()
        found = model.read_card()
        assert found is not None
        model.take_card(found)
        assert (model.recommended_by, model.envelope.default_max_tokens) == ("family", None)
        (place / "other.json").write_text("{")
        with pytest.raises(UsageError, match=r"other\.json"):
            model.read_card()


def test_a_directory_that_is_none_is_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^--model-cards {tmp_path}/none: not a directory$"):
        card(made(), tmp_path / "none")


def test_the_cards_of_luce_are_valid_and_have_sources(made: Made) -> None:
    names = [path.name.removesuffix(".json") for path in (resources.files("luce") / "model_cards").iterdir()]
    assert len(names) > 5
    for name in names:
        found = card(made(f"{name}-Q8_0.gguf"))
        assert found is not None and found.origin == f"packaged: {name}.json"
        content = json.loads((resources.files("luce") / "model_cards" / f"{name}.json").read_text())
        assert content["source"].startswith("https://") and date.fromisoformat(content["verified_at"])
        assert found.sampling == content["sampling"] and found.sampling.keys() <= SAMPLERS.keys()
        assert found.max_tokens == content.get("max_tokens")


def test_a_model_has_the_values_of_its_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_gguf(TINY) as file:
        name = card_names(file)[0]
    place = folder(tmp_path, **{name: {**FULL, "sampling": {"temperature": 0.0}}})
    common: dict[str, Any] = {"max_ctx": 64, "kv_cache_dir": "off", "target_device": "cpu:0", "model_cards": place}
    with luce.load(TINY, **common) as model:
        replies = [[t.id for t in model.generate([5, 6], max_tokens=6, ignore_eos=True)] for _ in range(2)]
        assert replies[0] == replies[1]
        assert model.config.temperature == 0 and model.recommended_by == f"user: {name}.json"
        assert model.envelope.default_max_tokens == 1000
    with luce.load(TINY, **common, temperature=2.0) as model:
        assert model.config.temperature == 2
    command = ["inspect", str(TINY), "--model-cards", str(place), "--target-device", "cpu:0"]
    assert main([*command, "--json"]) == 0
    shown = {"name": "Big One", "source": f"user: {name}.json", "sampling": {"temperature": 0.0}}
    assert json.loads(capsys.readouterr().out)["model_card"] == shown
    assert main(command) == 0
    assert "Big One (user: " in capsys.readouterr().out
