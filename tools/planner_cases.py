"""Cases of the planner as JSON: those of tests/reference/plans.json, and random ones.

A case has `model`, `load`, `devices`, `pairs`, `offload` and `optimize`; units are seconds, bytes and operations per
second (tests/reference/README.md).
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.problem import Drafting, ExpertWork, HeadWork, LayerWork, Load, ModelWork, Offload, Problem

Case = dict[str, Any]
#: device, first layer, last layer, layers without their experts
Placement = list[list[Any]]


def layers_of(case: Case) -> list[dict[str, Any]]:
    """The layers of a case, one by one."""
    return [layer for layer in case["model"]["layers"] for _ in range(layer.get("repeat", 1))]


def problem_of(case: Case) -> Problem:
    """A case as the planner takes it."""
    model, load = case["model"], case["load"]
    layers = tuple(_layer(layer) for layer in layers_of(case))
    boundary = model["boundary"]
    widths = tuple(boundary[: len(layers)]) if isinstance(boundary, list) else (boundary,) * len(layers)
    work = ModelWork(model["hidden"], widths, model["embedding"], HeadWork(**model["head"]), layers)
    offload: Offload = case["offload"] if type(case["offload"]) is int else "auto" if case["offload"] else "off"
    return Problem(
        work,
        Load(**load),
        tuple(_device(device) for device in case["devices"]),
        {_pair(name): LinkFigures(**link) for name, link in case.get("pairs", {}).items()},
        case["optimize"],
        offload,
        case.get("margin", 0.03),
        drafting=Drafting(**case["drafting"]) if "drafting" in case else None,
    )


def _pair(name: str) -> tuple[str, str]:
    before, behind = name.split(">")
    return before, behind


def _layer(layer: dict[str, Any]) -> LayerWork:
    experts = ExpertWork(**layer["experts"]) if layer.get("experts") else None
    numbers = {name: layer[name] for name in ("bytes", "macs", "launches", "kv")}
    more = {name: layer[name] for name in ("slot", "slot_moved", "unpacked") if name in layer}
    return LayerWork(**numbers, attention=layer["attn"], window=layer.get("window") or None, experts=experts, **more)


def _device(device: dict[str, Any]) -> DeviceFigures:
    return DeviceFigures(
        name=device["name"],
        machine=device["host"],
        host=device["kind"] == "cpu",
        free=device["free"],
        read=device["read"],
        rates=tuple(sorted((int(rows), rate) for rows, rate in device["rates"].items())),
        launch=device["launch"],
        step=device["step"],
        way=LinkFigures(**device["way"]),
        daemon=device.get("place", ""),
        workspace=device.get("workspace", 0),
        unpack=device.get("unpack"),
        bus=LinkFigures(**device["bus"]) if "bus" in device else None,
        expand=device.get("expand", 1.0),
    )


class BruteForce:
    """Every placement of a case, one after another, in plain Python: an oracle that shares nothing with the planner."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.layers = layers_of(case)
        self.load = case["load"]
        self.n = len(self.layers)

    def best(self) -> tuple[float, Placement] | None:
        """Value and placement of the best one by the planner's rules; None if none fits."""
        found: dict[int, list[tuple[float, Any, Placement]]] = {}
        indices = range(len(self.case["devices"]))
        for size in range(1, min(len(indices), self.n) + 1):
            for order in itertools.permutations(indices, size):
                if not self._side_by_side(order):
                    continue
                for cuts in itertools.combinations(range(1, self.n), size - 1):
                    made = self.value(order, cuts)
                    if made is not None:
                        away = sum(stage[3] for stage in made[1])
                        key = away, order, [-cut for cut in cuts]
                        found.setdefault(size, []).append((made[0], key, made[1]))
        if not found:
            return None
        least = {size: min(entry[0] for entry in entries) for size, entries in found.items()}
        limit = min(least.values()) * (1 + self.case.get("margin", 0.03))
        size = min(size for size, value in least.items() if value <= limit)
        tied = [entry for entry in found[size] if entry[0] <= least[size] * (1 + 1e-9)]
        value, _, placement = min(tied, key=lambda entry: entry[1])
        return value, placement

    def _side_by_side(self, order: tuple[int, ...]) -> bool:
        places = [self.case["devices"][index].get("place", "") for index in order]
        runs = [place for place, _ in itertools.groupby(places) if place]
        return len(runs) == len(set(runs))

    def value(self, order: tuple[int, ...], cuts: tuple[int, ...]) -> tuple[float, Placement] | None:
        """Value and stages of one placement."""
        devices = [self.case["devices"][index] for index in order]
        q = {1: 2048, 2: 1024}.get(len(order), 512)
        if any(device["kind"] == "cpu" for device in devices):
            q = 512
        q = min(q, self.load["prompt"])
        m = math.ceil(self.load["prompt"] / q)
        bounds = [0, *cuts, self.n]
        decodes, pieces = [], []
        on_cpu: dict[str, float] = {}
        memory: dict[str, float] = {}
        stages: Placement = []
        for k, device in enumerate(devices):
            stage = self._stage(device, bounds[k], bounds[k + 1], q)
            if stage is None:
                return None
            decode, piece, pooled, busy, away = stage
            decodes.append(decode)
            pieces.append(piece)
            host = device["host"]
            memory[host] = memory.get(host, 0) + pooled
            on_cpu[host] = on_cpu.get(host, 0) + busy
            stages.append([device["name"], bounds[k], bounds[k + 1] - 1, away])
        for host, size in memory.items():
            room = sum(d["free"] for d in self.case["devices"] if d["kind"] == "cpu" and d["host"] == host) * 0.94
            if size > room:
                return None
        ends = devices[0]["way"]["latency"] + devices[-1]["way"]["latency"]
        hops = [
            (self._hop(a, b, self._boundary(at) * self.load.get("rows", 1)), self._hop(a, b, self._boundary(at) * q))
            for a, b, at in zip(devices, devices[1:], cuts, strict=False)
        ]
        decode = sum(decodes) + sum(hop[0] for hop in hops) + ends
        slowest = max(pieces + [hop[1] for hop in hops] + list(on_cpu.values()))
        prompt = sum(pieces) + sum(hop[1] for hop in hops) + ends + (m - 1) * slowest
        if "drafting" in self.case:
            decode = (decode + self.case["drafting"]["seconds"]) / self.case["drafting"]["tokens"]
        by_objective = {"decode": decode, "prompt": prompt, "balanced": prompt + self.load.get("reply", 256) * decode}
        return by_objective[self.case["optimize"]], stages

    def _boundary(self, at: int) -> float:
        boundary = self.case["model"]["boundary"]
        return float(boundary[at] if isinstance(boundary, list) else boundary)

    def _hop(self, a: dict[str, Any], b: dict[str, Any], size: float) -> float:
        pair = self.case.get("pairs", {}).get(a["name"] + ">" + b["name"])
        parts = [pair] if pair else [a["way"], b["way"]]
        return float(sum(part["latency"] + size / part["bandwidth"] for part in parts))

    def _stage(self, device: dict[str, Any], a: int, b: int, q: int) -> tuple[float, float, float, float, int] | None:
        """Decode and piece seconds, bytes in the host's memory, the CPU's seconds, layers without experts."""
        cpu = None
        offload = self.case["offload"]
        if offload is not False and device["kind"] != "cpu":
            cpu = next((d for d in self.case["devices"] if d["kind"] == "cpu" and d["host"] == device["host"]), None)
        with_experts = [i for i in range(a, b) if self.layers[i].get("experts")]
        choices = [0]
        if type(offload) is int and device["kind"] != "cpu":
            fixed = [i for i in range(self.n) if self.layers[i].get("experts")][-offload:] if offload else []
            choices = [len(set(fixed) & set(with_experts))]
            if choices[0] and cpu is None:
                return None
        elif cpu is not None:
            choices = list(range(len(with_experts) + 1))
        for away in choices:
            gone = with_experts[len(with_experts) - away :]
            need = self._need(device, a, b, gone, q)
            if need <= device["free"] * 0.94:
                break
        else:
            return None
        load = self.load
        decode = piece = device["step"]
        busy = 0.0
        for i in range(a, b):
            helper = cpu if i in gone else None
            decode += self._layer(device, i, load.get("rows", 1), load.get("depth", load["prompt"]), False, helper)[0]
            seconds, by_cpu = self._layer(device, i, q, load["prompt"] / 2, True, helper)
            piece, busy = piece + seconds, busy + by_cpu
        if "unpack" in device:
            left = (device["free"] * 0.94 - need) / 2
            for i in range(a, b):
                size = self.layers[i].get("unpacked", 0)
                if size <= left:
                    left -= size
                else:
                    piece += size / device["unpack"]
        if b == self.n:
            head = self.case["model"]["head"]
            decode += self._product(device, load.get("rows", 1), head["bytes"], head["macs"])
            decode += head["launches"] * device["launch"]
        if device["kind"] == "cpu":
            return decode, piece, need, piece, away
        pooled = sum(self.layers[i]["experts"]["bytes"] * (cpu or {}).get("expand", 1) for i in gone)
        return decode, piece, pooled, busy, away

    def _need(self, device: dict[str, Any], a: int, b: int, gone: list[int], q: int) -> float:
        load, model, expand = self.load, self.case["model"], device.get("expand", 1)
        total = float(device.get("workspace", 0))
        for i in range(a, b):
            layer = self.layers[i]
            window = layer.get("window")
            positions = min(load["context"], window + load.get("chunk", 2048)) if window else load["context"]
            experts = layer["experts"]["bytes"] if layer.get("experts") and i not in gone else 0
            total += (layer["bytes"] + experts) * expand
            total += load["sequences"] * (layer["kv"] * positions + layer.get("slot", 0))
        if a > 0:
            total += self._boundary(a) * 2 * (q * 3 // 2 + 128)
        elif device["kind"] != "cpu":
            total += model["embedding"]
        if b == self.n:
            total += model["head"]["bytes"] * expand
        return total

    def _layer(
        self, device: dict[str, Any], i: int, rows: int, depth: float, prompt: bool, cpu: dict[str, Any] | None
    ) -> tuple[float, float]:
        layer = self.layers[i]
        seen = min(depth, layer["window"]) if layer.get("window") else depth
        seconds = layer["launches"] * device["launch"] + self._product(device, rows, layer["bytes"], layer["macs"])
        if prompt:
            seconds += 2 * layer["attn"] * rows * seen / self._rate(device, rows)
        else:
            seconds += rows * (layer["kv"] * seen + layer.get("slot_moved", 0)) / device["read"]
        experts = layer.get("experts")
        if not experts:
            return seconds, 0.0
        touched = experts["count"] * (1 - (1 - experts["used"] / experts["count"]) ** rows)
        where = device if cpu is None else cpu
        size = touched / experts["count"] * experts["bytes"]
        own = self._product(where, rows, size, experts["used"] * experts["macs"])
        own += experts["launches"] * where["launch"]
        if cpu is None:
            return seconds + own, 0.0
        bus, copied = device["bus"], 4 * self.case["model"]["hidden"] * rows
        return seconds + own + 2 * (bus["latency"] + copied / bus["bandwidth"]), own

    def _product(self, device: dict[str, Any], rows: int, size: float, macs: float) -> float:
        read = size * device.get("expand", 1) / device["read"]
        return float(max(read, 2 * macs * rows / self._rate(device, rows)))

    @staticmethod
    def _rate(device: dict[str, Any], rows: int) -> float:
        measured = {int(r): math.log(rate) for r, rate in device["rates"].items()}
        known = sorted(measured)
        low = max((r for r in known if r <= rows), default=known[0])
        high = min((r for r in known if r >= rows), default=known[-1])
        if low == high:
            return math.exp(measured[low])
        if rows <= low:
            return math.exp(measured[low])
        part = (math.log(rows) - math.log(low)) / (math.log(high) - math.log(low))
        return math.exp(measured[low] * (1 - part) + measured[high] * part)


def random_case(rng: random.Random) -> Case:
    """A small case: up to 4 devices and 8 layers, with windows, recurrent layers, experts, several machines, links
    and drafts by chance. Memory is about what the model takes, so that some placements fit and others do not."""
    count = rng.randint(2, 8)
    experts = rng.random() < 0.5
    layers = [_random_layer(rng, experts=experts and rng.random() < 0.8) for _ in range(count)]
    total = sum(layer["bytes"] + layer.get("experts", {}).get("bytes", 0) for layer in layers)
    hidden = rng.choice((1024, 2048, 4096))
    boundary: Any = 4 * hidden if rng.random() < 0.6 else [rng.randint(4, 12) * hidden for _ in range(count + 1)]
    model = {"hidden": hidden, "boundary": boundary, "embedding": rng.randint(0, 10**8), "layers": layers}
    model["head"] = {"bytes": rng.randint(10**7, 10**8), "macs": rng.randint(10**7, 2 * 10**8), "launches": 3}
    prompt = rng.choice((300, 512, 2000, 8192))
    load = {"sequences": rng.choice((1, 3)), "context": rng.choice((2048, 16384)), "prompt": prompt}
    load |= {"reply": rng.choice((16, 256)), "rows": rng.choice((1, 4))}
    if rng.random() < 0.5:
        load["depth"] = rng.randint(1, load["context"])
    devices = _random_devices(rng, total)
    pairs = {}
    for a, b in itertools.permutations(devices, 2):
        if a["host"] == b["host"] and rng.random() < 0.4:
            pairs[a["name"] + ">" + b["name"]] = _random_link(rng)
    offload: Any = rng.choice((False, True, rng.randint(0, count))) if experts else False
    objective = rng.choice(("decode", "prompt", "balanced"))
    case = {"model": model, "load": load, "devices": devices, "pairs": pairs, "offload": offload}
    if rng.random() < 0.4:
        case["drafting"] = {"tokens": rng.uniform(1, 5), "seconds": 10 ** rng.uniform(-4, -1.5)}
    return case | {"optimize": objective, "margin": rng.choice((0.0, 0.03))}


def _random_layer(rng: random.Random, *, experts: bool) -> dict[str, Any]:
    size = rng.randint(10**8, 10**9)
    layer: dict[str, Any] = {"bytes": size, "macs": int(size * rng.uniform(0.5, 2)), "launches": rng.randint(5, 15)}
    layer |= {"kv": rng.choice((0, 2048, 8192)), "attn": rng.choice((0, 4096, 8192)), "unpacked": 2 * size}
    if rng.random() < 0.3:
        layer |= {"slot": 3_000_000, "slot_moved": 6_000_000}
    if rng.random() < 0.3:
        layer["window"] = rng.choice((512, 1024))
    if experts:
        count, own = rng.choice((8, 64)), rng.randint(10**8, 2 * 10**9)
        layer["experts"] = {"bytes": own, "macs": own // count, "count": count, "used": rng.choice((1, 2, 8))}
        layer["experts"]["launches"] = 4
    return layer


def _random_link(rng: random.Random) -> dict[str, float]:
    return {"latency": 10 ** rng.uniform(-6, -2), "bandwidth": 10 ** rng.uniform(7, 10.5)}


def _random_devices(rng: random.Random, total: int) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = []
    for number in range(rng.randint(1, 4)):
        machine = rng.choice(("here", "here", "b"))
        cpu = rng.random() < 0.3 and not any(d["kind"] == "cpu" and d["host"] == machine for d in devices)
        read = 10 ** rng.uniform(10, 11) if cpu else 10 ** rng.uniform(11, 12.5)
        rates = {"1": read * 2, "16": read * rng.uniform(4, 20), "512": read * rng.uniform(20, 150)}
        device: dict[str, Any] = {"name": f"d{number}", "host": machine, "kind": "cpu" if cpu else "cuda"}
        # A CPU may be too small for the experts that several GPUs could leave to it.
        share = rng.uniform(0.02, 0.8) if cpu else rng.uniform(0.2, 1.6)
        device |= {"free": int(total * share) + (0 if cpu else 10**9), "read": read, "rates": rates}
        device |= {"launch": rng.uniform(1e-6, 2e-5), "step": rng.uniform(1e-5, 1e-4), "workspace": 10**8}
        device |= {"way": _random_link(rng), "bus": {"latency": 1.5e-5, "bandwidth": 2.2e10}}
        if machine == "b":
            device["place"] = "b"
        if not cpu and rng.random() < 0.7:
            device["unpack"] = read * 0.8
        if cpu and rng.random() < 0.5:
            device["expand"] = 6.9
        if devices and not cpu and rng.random() < 0.2:
            twin = devices[-1]
            if twin["kind"] != "cpu":
                device = twin | {"name": device["name"]}
        devices.append(device)
    return devices
