"""Opens the small models that score texts: that of --prefill-drafter, and that of KVFlash's policy `drafter`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luce.backend.placement import default_chunk, usable_bytes
from luce.backend.serving_options import Claim
from luce.compress.compression_options import CompressionOptions
from luce.compress.compressor import Compressor
from luce.compress.messages import Response
from luce.compress.remote import RemoteScorer
from luce.compress.scorer import LONGEST, Retokenize, Scorer, TextScorer, no_check, scorer_bytes
from luce.compress.span_cache import SpanStore
from luce.config.settings import Config
from luce.errors import UsageError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import GGUFFile, open_gguf
from luce.layers.weight_pool import WeightPool
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.remote.device import is_remote
from luce.remote.open import open_draft_daemon
from luce.runtime.device import Device, DeviceName
from luce.runtime.open import named, open_all
from luce.runtime.step import Int32
from luce.shard.layerwise import Reading

_DEVICE = "prefill_drafter_device"


@dataclass(frozen=True)
class ScorerPlan:
    """A small model that is not loaded yet, and its own device."""

    path: Path
    file: GGUFFile
    spec: ModelSpec
    device: Device
    reading: Reading
    #: most tokens of a segment
    longest: int
    #: shares its weights
    weights: WeightPool
    #: whether the memory of its weights counts with another small model
    shares: bool

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Bytes of its weights on its device, parked ones those that are there at once, and of all else.

        Raises ModelError if the model cannot score.
        """
        return scorer_bytes(self.file, self.spec, self.device, self.longest, self.reading)

    @property
    def bytes(self) -> int:
        """Bytes on its device that count with it."""
        return sum(self.sizes[self.shares :])

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The memory of this machine to reserve for it."""
        return () if self.device.name.place else (Claim(self.device, self.bytes),)

    @property
    def free(self) -> int:
        """Free memory of the device in bytes."""
        return usable_bytes(self.device)

    @property
    def facts(self) -> dict[str, str | int]:
        """Its file, device and size, for users."""
        shared = {"shared_weights": self.sizes[0]} if self.shares else {}
        parked = {"weights": "parked"} if self.reading.parked else {}
        return {"file": str(self.path), "device": str(self.device.name), "bytes": self.bytes, **shared, **parked}

    def identity(self, target: GGUFFile) -> str:
        """Names all that the kept tokens of a prompt depend on beside the prompt and the keep ratio.

        `target`: its vocabulary says what token ids mean.
        """
        # Parked weights are the same ones.
        return f"{fingerprint(target)} {fingerprint(self.file)} {replace(self.reading, parked=False)} {self.longest}"

    def beside(self, config: Config, fits: Callable[[tuple[Claim, ...]], bool]) -> ScorerPlan:
        """This small model beside a target, with its weights parked where only so both fit and the settings allow it.

        `fits`: whether the target fits beside the claims.
        """
        if self.reading.parked or self.shares or config.draft_residency != "auto" or fits(self.claims):
            return self
        parked = replace(self, reading=replace(self.reading, parked=True))
        return parked if fits(parked.claims) else self

    def load(self, retokenize: Retokenize | None) -> Scorer:
        """Load it."""
        if is_remote(self.device):
            return RemoteScorer(self.device, self.file, retokenize, reading=self.reading, longest=self.longest)
        return TextScorer(
            self.file,
            self.spec,
            self.device,
            retokenize,
            reading=self.reading,
            longest=self.longest,
            weights=self.weights,
        )


def plan_scorer(
    opened: contextlib.ExitStack,
    config: Config,
    path: str,
    devices: Sequence[Device],
    device: str = "auto",
    *,
    longest: int = LONGEST,
    weights: WeightPool | None = None,
) -> ScorerPlan:
    """The small model of a file beside a target on `devices`. `opened` closes its file and its device.

    `device`: the value of --prefill-drafter-device. `longest`: most tokens of a segment. `weights`: those of small
    models that are planned before. The small model gets a device object of its own: threads of the server run it beside
    those of the target's shards. The device is in a daemon where luce.remote.open.open_draft_daemon says so. Raises
    UsageError, ModelError or DeviceError if the file or the device cannot be used.
    """
    place = Path(path).expanduser()
    file = opened.enter_context(open_gguf(place))
    spec = read_spec(Source(str(place), file.metadata, file.tensors))
    here = [each.name for each in devices if not each.remote]
    name = _name(device, here)
    found: Device | None = None
    if device != "auto":
        found = open_draft_daemon(config, name, devices, Response, _DEVICE)
    if found is None:
        (found,) = open_all([name], _DEVICE, config.cpu_weights, beside=here)
    opened.enter_context(contextlib.closing(found))
    rows = default_chunk([found], config.chunk)
    weights = weights or WeightPool()
    shares = weights.plan(file, found)
    reading = Reading(
        rows,
        config.prefill_alpha,
        config.prefill_layers,
        config.prefill_scored_layers,
        parked=config.draft_residency == "request-scoped" and not shares,
    )
    plan = ScorerPlan(place, file, spec, found, reading, longest, weights, shares)
    # Refuses models that cannot score before anything large is loaded.
    assert plan.bytes
    return plan


def _name(device: str, here: Sequence[DeviceName]) -> DeviceName:
    if device == "auto":
        return here[-1] if here else named(["cpu:0"])[0]
    name, *more = named([device])
    if more:
        raise UsageError(f"--prefill-drafter-device {device}: expected one device", param=_DEVICE)
    return name


class SharedScorer:
    """One small model for several users: the first one loads it, the last one releases it. Thread-safe."""

    def __init__(self, load: Callable[[], Scorer]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._scorer: Scorer | None = None
        self._users = 0

    def open(self) -> ScorerUser:
        """The model for one more user, who closes it. Raises the exceptions of `load`."""
        with self._lock:
            if self._scorer is None:
                self._scorer = self._load()
            self._users += 1
            return ScorerUser(self._scorer, self._leave)

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._scorer is not None:
                self._scorer.close()
                self._scorer = None


class ScorerUser:
    """See luce.compress.scorer.Scorer."""

    def __init__(self, scorer: Scorer, leave: Callable[[], None]) -> None:
        self._scorer: Scorer | None = scorer
        self._leave = leave

    def __call__(
        self,
        tokens: Int32,
        *,
        segment: int = LONGEST,
        rotated: bool = False,
        check: Callable[[], None] = no_check,
    ) -> NDArray[np.float64]:
        assert self._scorer is not None
        return self._scorer(tokens, segment=segment, rotated=rotated, check=check)

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer = None
            self._leave()


def open_compressor(
    config: Config, plan: ScorerPlan, shared: SharedScorer, identity: str, store: SpanStore | None
) -> Compressor:
    """The compressor of a Config with the small model of a plan. `identity`, `store`: as for Compressor."""
    return Compressor(
        CompressionOptions.of(config),
        shared.open,
        identity=identity,
        keep_loaded=config.draft_residency != "request-scoped",
        facts=plan.facts,
        store=store,
    )
