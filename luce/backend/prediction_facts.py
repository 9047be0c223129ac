"""A prediction as facts for JSON and as a line for logs: `luce plan`, `GET /props` and metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from luce.backend.device_figures import has_int8
from luce.backend.measured_devices import MeasuredDevices, is_slow
from luce.planner.prediction import Prediction, limit
from luce.planner.problem import Problem
from luce.profiles.profile import DeviceProfile, LinkProfile, Phase


@dataclass(frozen=True)
class PredictedPlan:
    """How fast the placement of a model is."""

    problem: Problem
    prediction: Prediction
    #: the figures that it rests on, by device
    known: MeasuredDevices
    #: it is the fastest one by a coarse search
    near: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """See prediction_facts; and `optimize`, `load`, `draft` (see draft_facts), `left_out`, `near`, and `profiles`
        (see profile_facts)."""
        used = {shard.shard.device for shard in self.prediction.shards}
        return {
            "optimize": self.problem.objective,
            "load": load_facts(self.problem),
            "draft": draft_facts(self.problem),
            **prediction_facts(self.prediction),
            "left_out": [device.name for device in self.problem.devices if device.name not in used],
            "near": self.near,
            "profiles": profile_facts(self.known),
        }

    @property
    def text(self) -> str:
        """The placement with its speed."""
        facts = self.facts
        stages = (
            f"{stage['device']} layers {stage['layers'][0]}..{stage['layers'][1]}"
            + (f" (experts of {stage['offloaded']} on the CPU)" if stage["offloaded"] else "")
            for stage in facts["stages"]
        )
        left = f"; left out: {', '.join(facts['left_out'])}" if facts["left_out"] else ""
        return (
            f"placement for {facts['optimize']}: {', '.join(stages)}; predicted: decode {facts['decode_tok_s']:.1f} "
            f"tok/s, prompts {facts['prompt_tok_s']:.0f} tok/s{left}"
        )


def load_facts(problem: Problem) -> dict[str, int]:
    """What is predicted: sequences, and tokens of context, prompt and reply."""
    return {name: getattr(problem.load, name) for name in ("sequences", "context", "prompt", "reply")}


def draft_facts(problem: Problem) -> dict[str, Any] | None:
    """How tokens are drafted; None if they are not.

    device, bytes     of the drafter; None and 0 where it computes nothing on a device
    rows              of a sequence that a step verifies
    tokens_per_step   that a step is counted on to give, and whether servers have measured it (measured); 1 until then
    decode_s          of a step's proposals, in each decoding step; None where the device has no figures
    """
    draft = problem.drafting
    if draft is None:
        return None
    return {
        "device": draft.device or None,
        "bytes": draft.bytes,
        "rows": problem.load.rows,
        "tokens_per_step": draft.tokens,
        "measured": draft.measured,
        "decode_s": draft.seconds,
    }


def prediction_facts(prediction: Prediction) -> dict[str, Any]:
    """Times are in seconds, sizes in bytes.

    stages   device, layers (first, last), offloaded (how many layers leave their experts to the CPU), bytes, of these
             weights, the state of all sequences and buffers of activations, free bytes of the device, decode_s of a
             decoding step, piece_s of a piece of a prompt, and what limits each (limit, piece_limit)
    links    between them, with bytes per token, decode_s and piece_s
    value (what the search makes small), decode_tok_s, prompt_tok_s, prompt_s until the first token, the pieces of a
    prompt with their rows, and what they wait for (slowest): a device, a link, or the CPU of a machine
    """
    stages = [
        {
            "device": stage.shard.device,
            "layers": [stage.shard.layers.start, stage.shard.layers.stop - 1],
            "offloaded": stage.shard.offloaded,
            "bytes": stage.bytes,
            "weights": stage.bytes - stage.state - stage.buffers,
            "state": stage.state,
            "buffers": stage.buffers,
            "free": stage.free,
            "decode_s": stage.decode.total,
            "limit": limit(stage.decode),
            "piece_s": stage.piece.total,
            "piece_limit": limit(stage.piece),
        }
        for stage in prediction.shards
    ]
    links = [
        {
            "from": link.before,
            "to": link.behind,
            "bytes_per_token": link.row_bytes,
            "decode_s": link.decode,
            "piece_s": link.piece,
        }
        for link in prediction.links
    ]
    rates = {"decode_tok_s": prediction.decode_rate, "prompt_tok_s": prediction.prompt_rate}
    pieces = {"pieces": prediction.pieces, "rows": prediction.rows, "slowest": prediction.slowest}
    rates["value"] = prediction.value
    return {"stages": stages, "links": links, **rates, "prompt_s": prediction.prompt, **pieces}


def profile_facts(known: MeasuredDevices) -> dict[str, Any]:
    """By device: what identifies it as it is (key), seconds since the measurement (age_s), types of weights whose
    figures are noisy, the ratios by which servers' own times correct decoding (observed, None without) and prompts
    (observed_prompts), what its figures of prompts are of (prompts: fp16 or int8), and whether it has none of int8
    although prompts are multiplied in it (without_int8), and of a daemon's device the way of activations to it:
    latency_s and bytes_per_second, and whether it is slow."""
    return {
        name: {"key": known.keys.get(name), **_profile(profile, known.ways.get(name), known)}
        for name, profile in known.profiles.items()
    }


def _profile(profile: DeviceProfile, way: LinkProfile | None, known: MeasuredDevices) -> dict[str, Any]:
    noisy = [name for name, figures in profile.formats.items() if figures.noisy]
    facts = {"age_s": max(0.0, time.time() - profile.measured), "noisy": noisy, "way": None}
    phases: dict[str, Phase] = {"observed": "decode", "observed_prompts": "prompt"}
    for name, phase in phases.items():
        facts[name] = profile.observed[phase].ratio if phase in profile.observed else None
    facts["prompts"] = "int8" if known.int8 and has_int8(profile) else "fp16"
    facts["without_int8"] = known.int8 and facts["prompts"] == "fp16"
    if way is not None:
        facts["way"] = {"latency_s": way.latency, "bytes_per_second": way.bandwidth, "slow": is_slow(way)}
    return facts
