"""The predicted seconds of a whole placement, shard by shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luce.planner.figures import HERE
from luce.planner.layer_time import Seconds
from luce.planner.problem import Problem
from luce.planner.shard_tables import buffer_bytes, shard_seconds, shard_tables, state_bytes


@dataclass(frozen=True)
class PlacedShard:
    """Consecutive layers on a device."""

    device: str
    layers: range
    #: layers that leave their experts to the CPU, the last ones that have experts
    offloaded: int = 0


@dataclass(frozen=True)
class ShardPrediction:
    """A shard's part of a prediction."""

    shard: PlacedShard
    #: bytes of the device
    bytes: int
    #: of these, the ones of all sequences' states, and of activations
    state: int
    buffers: int
    #: bytes of the device that are free
    free: int
    #: of a decoding step
    decode: Seconds
    #: of a piece of a prompt
    piece: Seconds


@dataclass(frozen=True)
class LinkPrediction:
    """An activation's way from one shard to the next one."""

    before: str
    behind: str
    #: bytes of an activation, per token
    row_bytes: int
    #: seconds for the rows of a decoding step
    decode: float
    #: seconds for a piece of a prompt
    piece: float


@dataclass(frozen=True)
class Prediction:
    """How fast a placement is."""

    shards: tuple[ShardPrediction, ...]
    #: one less than shards
    links: tuple[LinkPrediction, ...]
    #: seconds of a decoding step, with its proposals where tokens are drafted
    decode: float
    #: seconds of a prompt
    prompt: float
    #: prompt rows in a piece
    rows: int
    pieces: int
    #: what the search makes small, in seconds
    value: float
    #: tokens per second of decoding and of prompts
    decode_rate: float
    prompt_rate: float
    #: at whose distance a prompt's pieces follow each other: a device, a link `A > B`, or the CPU of a machine
    slowest: str


def predict(problem: Problem, placement: Sequence[PlacedShard]) -> Prediction | None:
    """The prediction of a placement; None if it does not fit.

    Each shard waits for the one before it. A prompt's pieces follow each other at the distance of the slowest shard,
    link, or CPU, whose work for all shards of its machine counts together.
    """
    devices = {device.name: device for device in problem.devices}
    placed = [devices[shard.device] for shard in placement]
    rows = problem.piece_rows(len(placement), with_cpu=any(device.host for device in placed))
    pieces = problem.pieces(rows)
    shards: list[ShardPrediction] = []
    links: list[LinkPrediction] = []
    pooled: dict[str, float] = {}
    busy: dict[str, float] = {}
    for shard, device in zip(placement, placed, strict=True):
        given = shard.offloaded if problem.offload == "given" else None
        tables = shard_tables(problem, device, rows, offloaded=given)
        at = shard.layers.start, shard.layers.stop
        if not tables.fits[at] or tables.offloaded[at] != shard.offloaded:
            return None
        times = shard_seconds(problem, device, shard.layers, shard.offloaded, float(tables.unpacked[at]), rows)
        state = sum(state_bytes(problem.load, problem.model.layers[layer], device) for layer in shard.layers)
        buffers = buffer_bytes(problem, device, shard.layers.start, rows)
        shards.append(ShardPrediction(shard, int(tables.bytes[at]), int(state), buffers, device.free, *times))
        pooled[device.machine] = pooled.get(device.machine, 0.0) + float(tables.pooled[at])
        busy[device.machine] = busy.get(device.machine, 0.0) + float(tables.busy[at])
        if shard.layers.start:
            size = problem.model.boundaries[shard.layers.start]
            before = placed[len(shards) - 2]
            seconds = (problem.link_seconds(before, device, size * count) for count in (problem.load.rows, rows))
            links.append(LinkPrediction(before.name, device.name, size, *seconds))
    if any(size > problem.pools.get(machine, 0.0) for machine, size in pooled.items() if size):
        return None
    ends = placed[0].way.latency + placed[-1].way.latency
    decode = ends + sum(shard.decode.total for shard in shards) + sum(link.decode for link in links)
    decode += problem.drafting_seconds
    waits = {shard.shard.device: shard.piece.total for shard in shards}
    waits |= {f"{link.before} > {link.behind}": link.piece for link in links}
    waits |= {f"the CPU{'' if machine == HERE else f' of {machine}'}": seconds for machine, seconds in busy.items()}
    longest = max(waits.values())
    # A CPU that holds one shard has that shard's time, up to the order of the sums.
    slowest = next(name for name, seconds in waits.items() if seconds >= longest * (1 - 1e-9))
    once = ends + sum(shard.piece.total for shard in shards) + sum(link.piece for link in links)
    prompt = once + (pieces - 1) * longest
    value = value_of(problem, decode, prompt)
    rates = problem.step_tokens / decode, problem.load.prompt / prompt
    return Prediction(tuple(shards), tuple(links), decode, prompt, rows, pieces, value, *rates, slowest)


def value_of(problem: Problem, decode: float, prompt: float) -> float:
    """What the search makes small: seconds of a token, of a prompt, or of a prompt with its reply.

    `decode`, `prompt`: seconds of a decoding step and of a prompt.
    """
    decoding, reading = problem.weights
    return decoding * decode + reading * prompt


def limit(seconds: Seconds) -> str:
    """What takes most of these seconds."""
    parts: Mapping[str, float] = {
        "memory read": seconds.memory,
        "arithmetic": seconds.arithmetic,
        "launches": seconds.launches + seconds.step,
        "unpacking": seconds.unpacking,
        "CPU experts": seconds.cpu_experts,
        "link": seconds.bus,
    }
    return max(parts, key=lambda name: parts[name])
