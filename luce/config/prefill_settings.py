"""Settings of prompt compression (PFlash)."""

from __future__ import annotations

from dataclasses import dataclass

from luce.config.field import SamplingDefaults, setting
from luce.config.values import choice, device, number, path_or_name, ratio_or_mass, shares, text, tokens

#: how prompts are compressed unless a request says otherwise, and what a request may say
MODES = ("off", "auto", "always")
#: no prompt is compressed: the scores decide which of its pages stay on the devices
RESIDENCY = "residency"
#: kept tokens have their positions in the whole prompt
ORIGINAL = "original"


@dataclass(frozen=True)
class PrefillSettings(SamplingDefaults):
    """A part of luce.config.settings.Config."""

    prefill_compression: str = setting(
        "off",
        choice(*MODES, RESIDENCY),
        "whether a small model reads a prompt first and the model only the parts that matter, which changes replies. "
        "auto: prompts of at least --prefill-threshold tokens, where that is faster; always: every prompt. Prompts "
        "that continue a conversation are read whole. residency: prompts are read whole, and with --kvflash the small "
        "model decides which pages stay on the devices",
        metavar="MODE",
        group="prompt compression",
    )
    prefill_drafter: str = setting(
        "",
        path_or_name,
        "GGUF file of the small model that reads prompts first, with any vocabulary",
        metavar="FILE",
        group="prompt compression",
    )
    prefill_drafter_device: str = setting(
        "auto",
        device,
        "device that runs it: auto (that of the model's last layers in this process, or cpu:0), cuda:N, hip:N, cpu:N, "
        "tcp://HOST:PORT/BACKEND:N",
        metavar="DEVICE",
        group="prompt compression",
    )
    prefill_threshold: int = setting(
        32000,
        tokens(1),
        "fewest tokens of a prompt that auto compresses",
        metavar="N",
        group="prompt compression",
    )
    prefill_keep_ratio: float = setting(
        0.05,
        number(0, 1, above=True),
        "share of a prompt that is kept, above 0 and at most 1",
        metavar="SHARE",
        group="prompt compression",
    )
    prefill_keep: str = setting(
        "ratio",
        ratio_or_mass,
        "ratio: keep a share of a prompt, as --prefill-keep-ratio or --prefill-curve says. mass:SHARE: keep the parts "
        "that have together this share of the small model's attention, above 0 and at most 1; mass:SHARE:MOST: but no "
        "larger share of the prompt than MOST. session: for each session_id a share of a prompt between 0.025 and 0.2, "
        "by how much of the attention earlier prompts kept",
        metavar="ratio|mass:SHARE[:MOST]|session",
        group="prompt compression",
    )
    prefill_freeze: bool = setting(
        False,
        text,
        "compress older messages of conversations, each one once and for itself, and read first prompts whole",
        group="prompt compression",
    )
    prefill_freeze_threshold: int = setting(
        1024,
        tokens(1),
        "fewest tokens of a message that --prefill-freeze compresses",
        metavar="N",
        group="prompt compression",
    )
    prefill_alpha: float = setting(
        0.12,
        number(0, 1),
        "the small model does not read blocks of keys whose score is less than this share of the best one's; 0: it "
        "reads all",
        metavar="SHARE",
        group="prompt compression",
    )
    prefill_layers: int = setting(
        0,
        tokens(0),
        "only the first N layers of the small model read a prompt, which takes a share of the time; 0: all",
        metavar="N",
        group="prompt compression",
    )
    prefill_scored_layers: int = setting(
        0,
        tokens(0),
        "of the layers with full attention that read a prompt, the attention of the last N counts; 0: of all",
        metavar="N",
        group="prompt compression",
    )
    prefill_positions: str = setting(
        "rebased",
        choice("rebased", ORIGINAL),
        "positions of the kept tokens. rebased: counted anew. original: those in the whole prompt, if the model was "
        "trained for as many",
        metavar="rebased|original",
        group="prompt compression",
    )
    prefill_curve: tuple[tuple[int, float], ...] = setting(
        (),
        shares,
        "share of a prompt that is kept by its number of tokens, linear between the points, instead of "
        "--prefill-keep-ratio",
        metavar="N:SHARE[,N:SHARE...]",
        group="prompt compression",
    )
