"""Model cards: what a model's makers recommend, in the JSON files of Lucebox's share/model_cards.

Those that come with Luce are in luce/model_cards; a file of --model-cards wins over one of them.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import msgspec

from luce.config.sampling import SAMPLERS
from luce.config.settings import Config, flag
from luce.config.values import EFFORT_SPELLINGS, EFFORTS
from luce.decoders import json_decoder
from luce.errors import UsageError
from luce.gguf.reader import GGUFFile, model_stem
from luce.models.sampling_defaults import checked, file_sampling, with_sampling
from luce.models.spec import Dialect, ModelSpec, ReasoningBudget

_log = logging.getLogger(__name__)

#: what quantisers put behind a model's name in the names of files, as `_slug` has it
_QUANT = re.compile(r"[-.](?:ud-)?(?:i?q\d|tq\d|b?f16|f32|fp16|fp32|mxfp4|nvfp4)[a-z0-9-]*$")
#: `general.finetune` of the models that makers call by their basename and size
_CHAT = ("", "it", "instruct", "chat")
_LEAST_REPLY_BUDGET = 256


class _Card(msgspec.Struct, forbid_unknown_fields=True):
    """A file. Numbers are checked one by one: those outside their range are left out."""

    name: str
    source: str
    verified_at: date
    max_tokens: int | None = None
    complex_problem_max_tokens: int | None = None
    hard_limit_reply_budget: int | None = None
    thinking_marker: str | None = None
    thinking_terminator_hint: str | None = None
    #: by the names of samplers that have a setting
    sampling: dict[str, int | float] = {}
    reasoning_effort_tiers: dict[Literal["low", "medium", "high", "x-high", "max"], int] = {}
    download_urls: dict[str, str] = {}
    notes: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError, which msgspec turns into its own error."""
        known = {name for name, sampler in SAMPLERS.items() if sampler.setting is not None}
        if unknown := self.sampling.keys() - known:
            raise ValueError(f"sampling has an unknown key `{min(unknown)}`")


@dataclass(frozen=True)
class ModelCard:
    """A card with the values that count."""

    name: str
    #: where it is: `user: FILE` or `packaged: FILE`
    origin: str
    sampling: Mapping[str, float]
    #: tokens that the makers recommend for a reply, and for one to a complex problem
    max_tokens: int | None = None
    complex_problem_max_tokens: int | None = None
    #: tokens of a reply that a limited reasoning leaves to the text
    hard_limit_reply_budget: int | None = None
    #: what ends a reasoning whose budget is used up
    thinking_terminator_hint: str = ""
    #: budgets of efforts, by the names of EFFORTS
    tiers: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Recommended:
    """A model's spec and the settings for it, with what is recommended where nobody has set anything."""

    config: Config
    spec: ModelSpec
    #: the card's origin, `gguf` for values of the file, or `family`
    source: str


def recommended(config: Config, file: GGUFFile, spec: ModelSpec, card: ModelCard | None) -> Recommended:
    """The values of the file's card, then those of the file."""
    own = file_sampling(file.metadata)
    if card is None:
        return Recommended(with_sampling(config, own), spec, "gguf" if own else "family")
    dialect = dataclasses.replace(spec.dialect, budget=_budget(card, spec.dialect))
    return Recommended(
        with_sampling(config, {**own, **card.sampling}), dataclasses.replace(spec, dialect=dialect), card.origin
    )


def find_recommended(config: Config, file: GGUFFile, spec: ModelSpec) -> Recommended:
    """As `recommended`, with the file's card as it is now. Raises UsageError, as find_card does."""
    return recommended(config, file, spec, find_card(config.model_cards, file))


def find_card(folder: Path | None, file: GGUFFile) -> ModelCard | None:
    """The card of a file: the first with one of `card_names`, in the user's folder, else of those that come with Luce.
    Raises UsageError that names a card of the folder that cannot be read."""
    wanted = card_names(file)
    for kind, cards in (("user", _user_cards(folder)), ("packaged", _packaged_cards(wanted))):
        for name in wanted:
            if name in cards:
                return _counting(cards[name], f"{kind}: {name}.json")
    return None


def card_names(file: GGUFFile) -> tuple[str, ...]:
    """The names of cards that are about a file, the surest first: `general.name`, `general.basename` with
    `general.size_label`, and the file's own name without its quant.

    Other models are made from a basename: a file with a version, or tuned for anything but chats, is none of them.
    """

    def text(key: str) -> str:
        value = file.metadata.get(f"general.{key}")
        return value if isinstance(value, str) else ""

    basename, size = text("basename"), text("size_label")
    plain = basename and size and not text("version") and text("finetune").lower() in _CHAT
    tuned = f"{basename}-{size}-{text('finetune')}" if plain and text("finetune") else ""
    names = (
        text("name"),
        tuned,
        f"{basename}-{size}" if plain else "",
        _QUANT.sub("", _slug(model_stem(file.paths[0]))),
    )
    return tuple(dict.fromkeys(slug for name in names if (slug := _slug(name))))


def _slug(name: str) -> str:
    """Lucebox's spelling: lower case, `-` for blanks, tabs and underscores, nothing else but letters, digits, `.`."""
    return re.sub(r"[^a-z0-9.-]", "", re.sub(r"[ \t_]", "-", name.lower()))


def _packaged_cards(names: tuple[str, ...]) -> dict[str, _Card]:
    folder = resources.files("luce") / "model_cards"
    return {name: _read(folder / f"{name}.json") for name in names if (folder / f"{name}.json").is_file()}


def _user_cards(folder: Path | None) -> dict[str, _Card]:
    """All cards of a directory: a mistake shows also where the model is another one."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise UsageError(f"{flag('model_cards')} {folder}: not a directory", param="model_cards")
    # Lucebox's directory has its schema too, as _schema.json.
    return {path.stem: _read(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith("_")}


def _read(path: Path | Traversable) -> _Card:
    try:
        return json_decoder(_Card).decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag('model_cards')}: {path}: {error}", param="model_cards") from None


def _counting(card: _Card, origin: str) -> ModelCard:
    """The values within their ranges; the log names the others."""

    def least(key: str, value: int | None, low: int) -> int | None:
        if value is None or value >= low:
            return value
        _log.warning("%s: %s is left out: expected %d at least, got %d", origin, key, low, value)
        return None

    sampling = {key: checked(key, value, f"{origin}: sampling.{key}") for key, value in card.sampling.items()}
    tiers = {
        EFFORT_SPELLINGS.get(key, key): least(f"reasoning_effort_tiers.{key}", value, 0)
        for key, value in card.reasoning_effort_tiers.items()
    }
    return ModelCard(
        card.name,
        origin,
        {name: value for name, value in sampling.items() if value is not None},
        least("max_tokens", card.max_tokens, 1),
        least("complex_problem_max_tokens", card.complex_problem_max_tokens, 1),
        least("hard_limit_reply_budget", card.hard_limit_reply_budget, _LEAST_REPLY_BUDGET),
        card.thinking_terminator_hint or "",
        {name: tiers[name] for name in EFFORTS if tiers.get(name) is not None},  # type: ignore[misc]
    )


def _budget(card: ModelCard, dialect: Dialect) -> ReasoningBudget:
    """The family's budget with what the card says instead."""
    family, changed = dialect.budget, dict[str, Any]()
    if card.max_tokens is not None:
        changed = {"usual_tokens": card.max_tokens, "most_tokens": 0, "limit": card.max_tokens}
    if card.complex_problem_max_tokens is not None:
        changed["most_tokens"] = card.complex_problem_max_tokens
    if card.hard_limit_reply_budget is not None:
        changed["reserved_tokens"] = card.hard_limit_reply_budget
    if card.tiers:
        changed["tiers"] = tuple(card.tiers.items())
    hint, close = card.thinking_terminator_hint, "" if dialect.reasoning is None else dialect.reasoning.close
    if hint and close and close in hint:
        changed["lead_in"], _, changed["lead_out"] = hint.partition(close)
    elif hint:
        _log.warning("%s: thinking_terminator_hint is left out: it has no %r", card.origin, close)
    return dataclasses.replace(family, **changed)
