"""Options of prompt compression: which prompts are compressed, and how much of them is kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from luce.compress.selection import Keep
from luce.config.settings import Config


class Verdict(Enum):
    """Whether a prompt is compressed, or why not."""

    COMPRESS = "compressed"
    OFF = "off"
    #: fewer tokens than the threshold
    SHORT = "short"
    #: the prompt continues a conversation: what the prefix cache has of it is worth more
    CONTINUATION = "continuation"
    #: older messages of a conversation are compressed, each for itself
    FREEZE = "frozen"
    #: the first prompt of a conversation, which stays whole where older messages are compressed later
    FIRST_TURN = "first_turn"
    #: by the measured times the target alone reads the prompt sooner
    SLOWER = "slower"
    #: the response needs the whole prompt: its log probabilities, or the text around a gap
    WHOLE = "whole"
    #: all tokens of the prompt are kept
    UNCHANGED = "unchanged"
    FAILED = "failed"


@dataclass(frozen=True)
class CompressionOptions:
    """The settings of prompt compression."""

    #: off, auto, always or residency
    mode: str = "off"
    #: fewest tokens of a prompt that `auto` compresses
    threshold: int = 32000
    #: kept chunks by chunks, in (0, 1]
    keep_ratio: float = 0.05
    #: share of the sum of all scores that is kept, in (0, 1], instead of a share of the chunks; 0: off
    keep_mass: float = 0.0
    #: of the chunks the largest share that `keep_mass` keeps, in (0, 1]
    keep_most: float = 1.0
    #: tokens and keep ratios, ascending: linear in between, constant outside; empty: `keep_ratio` for every length
    curve: tuple[tuple[int, float], ...] = ()
    #: whether older messages of a conversation are compressed, and fewest tokens of such a message
    freeze: bool = False
    freeze_threshold: int = 1024
    #: rebased: positions of kept tokens are counted anew; original: they are those in the whole prompt
    positions: str = "rebased"
    #: whether each conversation that has a name has a keep ratio of its own
    by_session: bool = False

    @classmethod
    def of(cls, config: Config) -> CompressionOptions:
        """The options of a Config."""
        kind, *shares = config.prefill_keep.split(":")
        mass, most = [*map(float, shares), 1.0][:2] if shares else (0.0, 1.0)
        return cls(
            config.prefill_compression,
            config.prefill_threshold,
            config.prefill_keep_ratio,
            mass,
            most,
            curve=config.prefill_curve,
            freeze=config.prefill_freeze,
            freeze_threshold=config.prefill_freeze_threshold,
            positions=config.prefill_positions,
            by_session=kind == "session",
        )

    def keep_for(self, tokens: int, keep_ratio: float | None = None) -> Keep:
        """How much of a prompt of so many tokens is kept. `keep_ratio`: a request's, which comes first."""
        if keep_ratio is None and self.keep_mass:
            return Keep(self.keep_mass, mass=True, most=self.keep_most)
        return Keep(self.ratio_for(tokens) if keep_ratio is None else keep_ratio)

    def ratio_for(self, tokens: int) -> float:
        """The keep ratio of a prompt of so many tokens."""
        if not self.curve:
            return self.keep_ratio
        for (low, low_ratio), (high, high_ratio) in pairwise(self.curve):
            if low <= tokens < high:
                return low_ratio + (high_ratio - low_ratio) * (tokens - low) / (high - low)
        return self.curve[0][1] if tokens < self.curve[0][0] else self.curve[-1][1]
