"""Options of prompt compression: which prompts are compressed, and how much of them is kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

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

    #: off, auto or always
    mode: str = "off"
    #: fewest tokens of a prompt that `auto` compresses
    threshold: int = 32000
    #: kept chunks by chunks, in (0, 1]
    keep_ratio: float = 0.05
    #: tokens and keep ratios, ascending: linear in between, constant outside; empty: `keep_ratio` for every length
    curve: tuple[tuple[int, float], ...] = ()
    #: whether older messages of a conversation are compressed, and fewest tokens of such a message
    freeze: bool = False
    freeze_threshold: int = 1024

    @classmethod
    def of(cls, config: Config) -> CompressionOptions:
        """The options of a Config."""
        return cls(
            config.prefill_compression,
            config.prefill_threshold,
            config.prefill_keep_ratio,
            config.prefill_curve,
            config.prefill_freeze,
            config.prefill_freeze_threshold,
        )

    def ratio_for(self, tokens: int) -> float:
        """The keep ratio of a prompt of so many tokens."""
        if not self.curve:
            return self.keep_ratio
        for (low, low_ratio), (high, high_ratio) in pairwise(self.curve):
            if low <= tokens < high:
                return low_ratio + (high_ratio - low_ratio) * (tokens - low) / (high - low)
        return self.curve[0][1] if tokens < self.curve[0][0] else self.curve[-1][1]
