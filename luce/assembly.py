"""`luce.load(...)`: opens everything that a Model needs, in order, from a file and a Config."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from luce.api import Model, ModelParts
from luce.backend.expert_placement import ExpertRequest
from luce.backend.fastest_placement import Goal, choose, known_plan
from luce.backend.kvflash_size import KVFlashRequest, tail_pages
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.measured_devices import ModelOnDevices
from luce.backend.observation import observe
from luce.backend.placement import default_chunk, default_context, fits_beside
from luce.backend.prediction_facts import PredictedPlan
from luce.backend.serving_options import Claim, ServingOptions
from luce.compress.compressor import Compressor
from luce.compress.open import ScorerPlan, SharedScorer, open_compressor, plan_scorer
from luce.compress.scorer import LONGEST
from luce.config.cache_directory import cache_directory
from luce.config.prefill_settings import RESIDENCY
from luce.config.resolve import resolve
from luce.config.settings import Config
from luce.draft.drafter import Drafter
from luce.draft.feature_tail import FeatureTails
from luce.draft.observed_drafts import draft_load, keeping, observed_path
from luce.draft.open import DraftPlan, PreparedDrafter, branch_pages, open_drafter, plan_drafter, verified_rows
from luce.draft.remote import RemoteDrafter
from luce.errors import DeviceError, LuceError, OutOfMemoryError, UsageError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.hub.lookup import resolve_model
from luce.hub.variants import DeviceMemory
from luce.kvcache.cache_ram import check_cache_ram
from luce.kvcache.disk.open import open_disk_tier
from luce.kvcache.disk.spans import SpanFiles
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.draft_scorer import SEGMENT, DraftScorer
from luce.kvcache.paging import KVFlash
from luce.kvcache.policies import open_policy, ranks_pages
from luce.layers.features import FeatureRing
from luce.layers.kept_weights import KeptWeights
from luce.layers.weight_pool import WeightPool
from luce.models.keys import Source
from luce.models.model_card import find_recommended
from luce.models.registry import read_spec
from luce.models.spec import ModelSpec
from luce.ops.kvtype import KVTypes
from luce.remote.device import RemoteDevice, is_remote, same_daemon
from luce.remote.open import NO_CONNECTS, Connects, open_placement
from luce.runtime.cores import limit_threads
from luce.runtime.device import Device
from luce.runtime.host import host_memory
from luce.runtime.open import total_memory
from luce.text.chat import ChatFormat
from luce.text.collector import COLLECTOR_OFF
from luce.text.open import open_chat, start_template
from luce.text.retokenize import Retokenizer
from luce.text.tokenizer import Tokenizer
from luce.text.vocabulary import KeptVocabularies, Vocabulary

_log = logging.getLogger(__name__)


def load(path: str | Path, **fields: Any) -> Model:
    """Load a GGUF file onto devices: a path, an alias such as `smollm2`, ORG/REPO:QUANT of the Hugging Face hub, or a
    URL, which is downloaded first if it is not on this machine.

    Every field of luce.config.settings.Config is a keyword with the checks of its flag:
    `luce.load("model.gguf", target_devices="cuda:0", max_ctx=4096)`. Raises LuceError: UsageError for a bad keyword,
    ModelError for a bad file, DeviceError for a bad device.
    """
    config = resolve(fields, spell=str)
    return open_model(resolve_model(str(path), memory=partial(device_memory, config)), config)


def device_memory(config: Config) -> DeviceMemory | None:
    """The memory for a model with these settings; None if all devices are in other machines."""
    total, names = total_memory(config)
    return DeviceMemory(total, ", ".join(names)) if names else None


@dataclasses.dataclass(frozen=True)
class Placed:
    """The devices of a model in the order of its layers, before the load."""

    devices: list[Device]
    #: the settings, with what the planner has chosen
    config: Config
    #: the layers of each device; empty: by shares or by free memory
    layers: tuple[range, ...] = ()
    #: how fast this placement is; None: the devices have no figures
    plan: PredictedPlan | None = None

    @property
    def computes(self) -> bool:
        """Whether results are the model's. What simulated devices did not compute is kept for no other process."""
        return all(device.computes for device in self.devices)


def place(
    opened: contextlib.ExitStack,
    config: Config,
    file: GGUFFile,
    spec: ModelSpec,
    on_figure: Callable[[str], None] = lambda figure: None,
    connects: Connects = NO_CONNECTS,
    weights: KeptWeights | None = None,
) -> Placed:
    """Open the devices of the settings, which `opened` closes, and choose which ones hold which layers.

    With --optimize, and for --devices auto, that is the fastest placement; devices without figures are measured, which
    `on_figure` sees. Where that fails it is the placement by free memory, and a line of the log says why; with
    --optimize the error is raised. Devices that hold no layers are closed. `weights`: what stays on this process's
    devices from an earlier load. Raises the errors of open_placement.
    """
    devices = open_placement(config, connects)
    for device in devices:
        opened.callback(device.close)
    if (goal := Goal.of(config)) is None or len(devices) < 2:
        options = dataclasses.replace(serving_options(config, spec, devices), weights=weights)
        model = ModelOnDevices(file, spec, devices, options)
        plan = known_plan(model, goal or Goal.default(config))
        if plan is not None and config.draft:
            with contextlib.ExitStack() as planning:
                model, _ = claimed(planning, config, file, spec, devices)
                plan = known_plan(model, goal or Goal.default(config))
        return Placed(devices, config, plan=plan)
    with contextlib.ExitStack() as planning:
        model, draft = claimed(planning, config, file, spec, devices)
        # Without the CPU, steps are longer, and windows keep more positions.
        chunk = default_chunk([device for device in devices if not device.host] or devices, config.chunk)
        model = dataclasses.replace(model, options=dataclasses.replace(model.options, chunk=chunk, weights=weights))
        try:
            chosen = choose(model, goal, config.measure_budget, on_figure)
        except LuceError as error:
            if config.optimize != "auto":
                raise
            _log.warning("layers go by free memory: %s", error)
            return Placed(devices, config)
    by_name = {str(device.name): device for device in devices}
    used = [by_name[name] for name in chosen.devices]
    for device in devices:
        # The end of a daemon would be that of all its devices.
        if device not in used and not any(same_daemon(device, other) for other in used):
            device.close()
    _log.info("%s", chosen.plan.text)
    if model.options.experts is not None:
        spans = ",".join(f"{layer}-{layer}" for layer in chosen.offloaded)
        config = dataclasses.replace(config, experts_on=spans or "device")
    if draft is not None and not draft.remote:
        # Without the devices that are left out, another one could be the last.
        config = dataclasses.replace(config, draft_device=str(draft.device.name))
    return Placed(used, config, chosen.layers, chosen.plan)


def claimed(
    planning: contextlib.ExitStack, config: Config, file: GGUFFile, spec: ModelSpec, devices: Sequence[Device]
) -> tuple[ModelOnDevices, DraftPlan | None]:
    """A model on devices for a plan, with the memory that a drafter and a small model for prompts will take, and the
    drafter, if it has weights and can be used. `planning` closes what is opened for it."""
    draft, claims, captured, weights = None, list[Claim](), tuple[int, ...](), WeightPool()
    load = None
    # What cannot be used is reported when it is opened.
    with contextlib.suppress(LuceError):
        context = default_context(spec, config.max_ctx)
        draft = plan_drafter(planning, config, file, spec, devices, context=context, weights=weights)
        if draft is not None:
            claims, captured = [*draft.claims()], draft.spec.layers
        load = draft_load(config, file, spec, draft)
    with contextlib.suppress(LuceError):
        if config.prefill_drafter:
            device = config.prefill_drafter_device
            scorer = plan_scorer(planning, config, config.prefill_drafter, devices, device, weights=weights)
            claims += scorer.claims
    options = dataclasses.replace(serving_options(config, spec, devices, claims), captured=captured)
    return ModelOnDevices(file, spec, devices, options, load), draft


class _DrafterError(Exception):
    """The drafter cannot be used; the message is the reason."""


def open_model(
    path: Path,
    config: Config,
    on_progress: Callable[[float], None] = lambda _: None,
    connects: Connects = NO_CONNECTS,
    vocabularies: KeptVocabularies | None = None,
) -> Model:
    """A Model from a file and a checked Config. `on_progress` gets the share of the layers that are read;
    `vocabularies` has those of models that were open before.

    The model has no drafter if the file of --draft is missing or refused, or if there is no memory for it;
    EngineStats.draft has the reason.
    """
    # A vocabulary is hundreds of thousands of objects, of which none is garbage.
    with COLLECTOR_OFF:
        try:
            return _open_model(path, config, on_progress, connects, vocabularies)
        except _DrafterError as error:
            reason = str(error)
        _log.warning("replies go on without drafting: %s", reason)
        scorer = config.kvflash_drafter or config.draft
        without = dataclasses.replace(config, draft="", ddtree=False, kvflash_drafter=scorer)
        return _open_model(path, without, on_progress, connects, vocabularies, no_drafter_reason=reason)


@contextlib.contextmanager
def _as_drafter_error(*kinds: type[LuceError]) -> Iterator[None]:
    """Turn errors of these kinds into a _DrafterError, except those of the command line."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        raise _DrafterError(str(error)) from error


def _open_model(
    path: Path,
    config: Config,
    on_progress: Callable[[float], None],
    connects: Connects,
    vocabularies: KeptVocabularies | None,
    *,
    no_drafter_reason: str = "",
) -> Model:
    """As open_model. `no_drafter_reason`: why there is no drafter although --draft names one. Raises _DrafterError."""
    limit_threads(config.threads)
    check_cache_ram(config)
    directory = cache_directory(config) if config.cache_ram else None
    with contextlib.ExitStack() as opened:
        child = start_template(opened)
        file = opened.enter_context(open_gguf(path))
        spec = read_spec(Source(str(path), file.metadata, file.tensors)).for_context(config.max_ctx)
        recommend = partial(find_recommended, config, file, spec)
        advice = recommend()
        config, spec = advice.config, advice.spec
        vocabulary = Vocabulary.read(file, spec) if vocabularies is None else vocabularies.read(file, spec)
        placed = place(opened, config, file, spec, connects=connects)
        devices, config = placed.devices, placed.config
        directory = directory if placed.computes else None
        # Behind what takes as long as the start of the template's process, before what takes seconds.
        chat = open_chat(opened, file, spec, config, vocabulary.tokenizer, child)
        with _as_drafter_error(LuceError):
            context, weights = default_context(spec, config.max_ctx), WeightPool()
            prepared = open_drafter(opened, config, file, spec, devices, context=context, weights=weights)
        scorers = Scorers(opened, config, devices, lambda: vocabulary.tokenizer, weights)
        ring, claims, tails = (None, (), None) if prepared is None else (prepared.ring, prepared.claims, prepared.tails)
        reserved = claims
        if config.prefill_drafter:
            options = dataclasses.replace(serving_options(config, spec, devices, claims), layers=placed.layers)
            reserved = (*claims, *scorers.beside(partial(fits_beside, file, spec, devices, options)).claims)
        with _as_drafter_error(*[OutOfMemoryError] if claims else []):
            backend = open_backend(
                opened, file, spec, devices, config, on_progress, ring=ring, claims=reserved, layers=placed.layers
            )
        if placed.plan is not None:
            observe(backend, placed.plan)
        drafter = None
        if prepared is not None:
            drafter, no_drafter_reason = _load_drafter(opened, prepared, backend)
        on_verified = None
        if prepared is not None and drafter is not None and placed.computes:
            on_verified = keeping(observed_path(config, file, prepared.spec)).add
        disk = None if directory is None else _open_disk(directory, backend, config, chat, tails)
        parts = ModelParts(
            file=file,
            spec=spec,
            vocabulary=vocabulary,
            chat=chat,
            backend=backend,
            disk=disk,
            kvflash=open_kvflash(opened, backend, config, scorers),
            plan=placed.plan,
            drafter=drafter,
            compressor=_compressor(opened, scorers, config, file, directory),
            feature_tails=tails,
            on_verified=on_verified,
            draft_devices=_draft_devices(drafter, scorers),
            no_drafter_reason=no_drafter_reason,
            immovable=_immovable(config, backend, drafter),
            recommended=advice,
            recommend=recommend,
        )
        model = Model(parts, config, resources := contextlib.ExitStack())
        resources.enter_context(opened.pop_all())
        return model


def _open_disk(
    directory: Path, backend: LayerSplitBackend, config: Config, chat: ChatFormat, tails: FeatureTails | None
) -> DiskTier:
    """The disk tier of the prefix cache, where a conversation finds its replies. `tails`: kept there too."""
    template, features = chat.template.source if chat.template else "", 0 if tails is None else tails.most_bytes
    disk = open_disk_tier(directory, backend.file, backend, config, template=template, features=features)
    chat.memory.look_up = disk.reply_tokens
    return disk


def _immovable(config: Config, backend: LayerSplitBackend, drafter: Drafter | None) -> str:
    """Why a model cannot move behind running replies: what it uses on the devices of its layers; empty: it can."""
    reasons = {
        "--draft": drafter is not None and config.draft != "ngram",
        "--kvflash": backend.capacity.max_resident_pages is not None,
        "--prefill-drafter": bool(config.prefill_drafter),
        "--kv-cache-placement exact": config.kv_cache_placement == "exact",
    }
    return ", ".join(name for name, used in reasons.items() if used)


def relocate(
    model: Model,
    config: Config,
    connects: Connects = NO_CONNECTS,
    worth: Callable[[PredictedPlan | None], bool] = lambda plan: True,
) -> None:
    """Load an open model on the devices of `config`, which are placed as for open_model, with the context that it has.

    For Model.engine.relocate, where `model.immovable` is empty. `worth`: whether that placement is to be taken, by how
    fast it is. Raises as open_model, and DeviceError where it is not worth it; then no device has the model.
    """
    backend = model.backend
    backend.unload()
    config = dataclasses.replace(config, max_ctx=backend.capacity.context, chunk=backend.options.chunk)
    with contextlib.ExitStack() as opened:
        weights = backend.options.weights
        placed = place(opened, config, backend.file, backend.spec, connects=connects, weights=weights)
        if not worth(placed.plan):
            raise DeviceError("another placement would not be faster by enough")
        options = serving_options(placed.config, backend.spec, placed.devices)
        backend.relocate(placed.devices, dataclasses.replace(options, layers=placed.layers, weights=weights))
        if placed.plan is not None:
            observe(backend, placed.plan)
        model.moved(placed.plan, opened.pop_all())


def _load_drafter(
    opened: contextlib.ExitStack, prepared: PreparedDrafter, backend: LayerSplitBackend
) -> tuple[Drafter | None, str]:
    """The drafter of a loaded target, or None and the reason. `opened` closes it. Raises UsageError."""
    try:
        drafter = prepared.open(backend.shards[0], backend.shards[-1])
    except UsageError:
        raise
    except LuceError as error:
        # The layers keep their placement, beside the memory that was left for the drafter.
        _log.warning("replies go on without drafting: %s", error)
        return None, str(error)
    opened.callback(drafter.close)
    return drafter, ""


def open_backend(
    opened: contextlib.ExitStack,
    file: GGUFFile,
    spec: ModelSpec,
    devices: Sequence[Device],
    config: Config,
    on_progress: Callable[[float], None] = lambda fraction: None,
    *,
    ring: FeatureRing | None = None,
    claims: Sequence[Claim] = (),
    layers: tuple[range, ...] = (),
) -> LayerSplitBackend:
    """The backend of a Config on `devices`. `opened` closes it; `on_progress` is as in open_model, `ring` and `claims`
    are as in LayerSplitBackend, `layers` as in Placed."""
    options = dataclasses.replace(serving_options(config, spec, devices, claims), layers=layers)
    if config.cluster:
        # Its model moves.
        options = dataclasses.replace(options, weights=KeptWeights())
    backend = LayerSplitBackend(file, spec, devices, options, ring=ring, on_progress=on_progress)
    opened.callback(backend.close)
    return backend


def serving_options(
    config: Config, spec: ModelSpec, devices: Sequence[Device], claims: Sequence[Claim] = ()
) -> ServingOptions:
    """The options of a Config for a model on `devices`; no layers are captured. Raises UsageError for a --max-ctx
    beyond the trained length."""
    return ServingOptions(
        slots=config.parallel,
        kv=KVTypes(config.cache_type_k, config.cache_type_v),
        verify_rows=verified_rows(config, spec),
        rank_pages=ranks_pages(config),
        peer=config.peer_access,
        context=default_context(spec, config.max_ctx),
        chunk=default_chunk(devices, config.chunk),
        kvflash=KVFlashRequest.parse(config.kvflash),
        branch_pages=branch_pages(config),
        layer_split=tuple(config.target_layer_split),
        experts=ExpertRequest.of(config, spec, devices),
        claims=tuple(claims),
        unpack=config.prompt_weights == "auto",
        prompt_precision=config.prompt_precision,
    )


def open_kvflash(
    opened: contextlib.ExitStack, backend: LayerSplitBackend, config: Config, scorers: Scorers
) -> KVFlash | None:
    """The options of paging; None if all pages are resident.

    `opened` closes the policy; `scorers` are for policies that read texts. Raises UsageError, ModelError and
    DeviceError if --kvflash-drafter cannot be used at all.
    """
    if backend.capacity.max_resident_pages is None:
        return None
    budget = config.kvflash_host_mb << 20 or host_memory().free // 2
    policy = open_policy(config, backend, scorers.for_pages, budget)
    opened.callback(policy.close)
    return KVFlash(policy, tail_pages(backend.spec.tail), config.kvflash_tau, budget)


class Scorers:
    """The small models that score texts, each loaded once for all parts of a model that use it.

    `opened` closes their files and devices. `tokenizer` returns the target's. `weights`: shared with the drafter.
    """

    def __init__(
        self,
        opened: contextlib.ExitStack,
        config: Config,
        devices: Sequence[Device],
        tokenizer: Callable[[], Tokenizer],
        weights: WeightPool | None = None,
    ) -> None:
        self._opened = opened
        self._config = config
        self._devices = devices
        self._tokenizer = tokenizer
        self._weights = weights
        self._shared: dict[Path, tuple[ScorerPlan, SharedScorer]] = {}

    def find(self, path: str, device: str = "auto", longest: int = LONGEST) -> tuple[ScorerPlan, SharedScorer]:
        """The small model of a file: the first caller chooses its device and the most tokens of a segment.

        Raises UsageError, ModelError or DeviceError if the file or the device cannot be used at all.
        """
        place = Path(path).expanduser().resolve()
        if place not in self._shared:
            limits: dict[str, Any] = {"longest": longest, "weights": self._weights}
            plan = plan_scorer(self._opened, self._config, path, self._devices, device, **limits)
            own = Tokenizer(plan.file.metadata, nfc=plan.spec.nfc, eos_texts=plan.spec.eos)
            target = self._tokenizer()
            retokenize = None if own.alike(target) else Retokenizer(target, own)
            self._shared[place] = plan, SharedScorer(lambda: self._shared[place][0].load(retokenize))
        return self._shared[place]

    def beside(self, fits: Callable[[tuple[Claim, ...]], bool]) -> ScorerPlan:
        """The small model of --prefill-drafter, before it is loaded. `fits`: as for ScorerPlan.beside.

        Raises as `find`.
        """
        plan, shared = self.find(self._config.prefill_drafter, self._config.prefill_drafter_device)
        self._shared[plan.path.resolve()] = beside = plan.beside(self._config, fits), shared
        return beside[0]

    def daemon(self) -> RemoteDevice | None:
        """The device of the small model of --prefill-drafter if it is in a daemon; no other one is."""
        return next((plan.device for plan, _ in self._shared.values() if is_remote(plan.device)), None)

    def for_pages(self) -> Callable[[], DraftScorer]:
        """A function that loads the scorer of KVFlash's policy. Raises as `find`."""
        config = self._config
        if config.prefill_compression == RESIDENCY:
            # As prompts are scored: whole, and without the decay of rotated keys.
            _, shared = self.find(config.prefill_drafter, config.prefill_drafter_device)
            return lambda: DraftScorer(shared.open(), segment=LONGEST, rotated=False)
        _, shared = self.find(config.kvflash_drafter or config.draft, longest=SEGMENT)
        return lambda: DraftScorer(shared.open())


def _draft_devices(drafter: Drafter | None, scorers: Scorers) -> dict[str, RemoteDevice]:
    """The devices in daemons of the drafter and of the small model that compresses prompts, by what they hold."""
    found = {"draft": drafter.device} if isinstance(drafter, RemoteDrafter) else {}
    return found | {"prefill_drafter": device} if (device := scorers.daemon()) is not None else found


def _compressor(
    opened: contextlib.ExitStack, scorers: Scorers, config: Config, target: GGUFFile, directory: Path | None
) -> Compressor | None:
    """The compressor of prompts, None without --prefill-drafter; `opened` closes it. `directory`: for their spans."""
    if not config.prefill_drafter:
        return None
    plan, shared = scorers.find(config.prefill_drafter, config.prefill_drafter_device)
    store = None if directory is None else SpanFiles(directory)
    compressor = open_compressor(config, plan, shared, plan.identity(target), store)
    opened.callback(compressor.close)
    return compressor
