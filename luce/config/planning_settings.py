"""Settings of the placement of layers by predicted speed."""

from __future__ import annotations

from dataclasses import dataclass

from luce.config.field import setting
from luce.config.values import choice, expert_layers, margins, number, text, tokens

#: what the placement makes small: bytes on each device by its free memory, or seconds
OBJECTIVES = ("memory", "decode", "prompt", "balanced")


@dataclass(frozen=True)
class PlanningSettings:
    """A part of luce.config.settings.Config."""

    experts_on: str = setting(
        "device",
        expert_layers,
        "where the routed experts of a mixture-of-experts model lie and are computed: device (with their layers), cpu "
        "(all on the CPU of the device's machine), auto (those of the last layers on the CPU, as few as the devices "
        "cannot hold), N (those of the last N layers on the CPU), or ranges of layers, such as 20-39",
        metavar="PLACE",
        group="placement",
    )
    optimize: str = setting(
        "auto",
        choice("auto", *OBJECTIVES),
        "what the placement of the layers makes fast, by figures that Luce measures: decode, prompt, or balanced (a "
        "prompt with its reply); it may leave out devices and change their order. memory: layers by free memory, on "
        "all devices. auto: balanced for --devices auto, memory for devices by name",
        metavar="GOAL",
        group="planning",
    )
    pin_devices: bool = setting(
        False,
        text,
        "with --optimize, keep all devices in the given order, and plan only which layers each one gets",
        group="planning",
    )
    optimize_prompt: int = setting(
        2048, tokens(1), "tokens of the prompt that --optimize plans for", metavar="N", group="planning"
    )
    optimize_reply: int = setting(
        256, tokens(1), "tokens of the reply that --optimize balanced plans for", metavar="N", group="planning"
    )
    device_margin: tuple[tuple[str, int], ...] = setting(
        (),
        margins,
        "memory of a device, or of each device, that is left to others, such as cuda:0=2GiB (default: 6% of what is "
        "free)",
        metavar="[DEVICE=]SIZE",
        group="planning",
    )
    measure_budget: float = setting(
        10.0,
        number(0, 86400),
        "longest time to measure devices without figures for --optimize; if it is too short, the placement is that of "
        "memory",
        metavar="SECONDS",
        group="planning",
    )
