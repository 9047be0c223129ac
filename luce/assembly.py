"""`luce.load(...)`: from a file and a Config to a Model: what is opened, in which order, and what closes it again."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import threadpoolctl

from luce.api import Model, ModelParts
from luce.backend.kvflash_size import KVFlashRequest, tail_pages
from luce.backend.layersplit import LayerSplitBackend
from luce.backend.placement import default_chunk, default_context
from luce.backend.serving_options import Claim, ServingOptions
from luce.config.directories import cache_directory
from luce.config.resolve import resolve
from luce.config.settings import Config, flag
from luce.draft.open import branch_pages, open_drafter, verified_rows
from luce.draft.remote import RemoteDrafter
from luce.errors import LuceError, ModelError, OutOfMemoryError, UsageError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.hub import resolve_model
from luce.kvcache.disk import fingerprint, manifest
from luce.kvcache.disk.fingerprint import Fingerprint
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.draft_scorer import DraftScorer
from luce.kvcache.paging import KVFlash
from luce.kvcache.policies import open_policy, ranks_pages
from luce.layers.features import FeatureRing
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import Dialect, ModelSpec
from luce.ops.kvtype import KVTypes
from luce.remote.open import open_placement
from luce.runtime.device import Device
from luce.runtime.host import host_memory
from luce.runtime.open import named, open_device
from luce.text.chat import ChatFormat
from luce.text.retokenize import Retokenizer
from luce.text.template import ChatTemplate
from luce.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def load(path: str | Path, **fields: Any) -> Model:
    """Load a GGUF file (or an alias such as `smollm2`) onto devices.

    Every field of luce.config.settings.Config is a keyword of the same spelling and with the same checks as the flag:
    `luce.load("model.gguf", target_devices="cuda:0", max_ctx=4096)`. Raises LuceError: UsageError for a bad keyword,
    ModelError for a bad file, DeviceError for a bad device.
    """
    return open_model(resolve_model(str(path)), resolve(fields, spell=str))


_UNDRAFTED = "replies go on without drafting: %s"


class _UndraftedError(Exception):
    """The drafter cannot be had, for the reason that the cause tells."""


def open_model(path: Path, config: Config, on_progress: Callable[[float], None] = lambda fraction: None) -> Model:
    """A Model from a file and a checked Config. `on_progress` gets the share of the layers that are read.

    A --draft that is missing or refused, or for which there is no memory, is done without; EngineStats.draft says why.
    """
    try:
        return _open_model(path, config, on_progress)
    except _UndraftedError as error:
        why = str(error)
    _log.warning(_UNDRAFTED, why)
    scorer = config.kvflash_drafter or config.draft
    alone = dataclasses.replace(config, draft="", ddtree=False, kvflash_drafter=scorer)
    return _open_model(path, alone, on_progress, undrafted=why)


@contextlib.contextmanager
def _without_draft(*kinds: type[LuceError]) -> Iterator[None]:
    """Errors of these kinds, but for those of the command line, are the drafter's."""
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        raise _UndraftedError(str(error)) from error


def _open_model(path: Path, config: Config, on_progress: Callable[[float], None], *, undrafted: str = "") -> Model:
    """As open_model; `undrafted`: why there is no drafter although one is wanted."""
    if config.threads:
        threadpoolctl.threadpool_limits(config.threads, user_api="blas")
    _check_cache_ram(config)
    directory = cache_directory(config) if config.cache_ram else None
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open_gguf(path))
        spec = read_spec(Source(str(path), file.metadata, file.tensors))
        tokenizer = Tokenizer(file.metadata, nfc=spec.nfc, eos_texts=spec.eos)
        if tokenizer.vocab > spec.vocab:
            raise ModelError(f"{path}: {tokenizer.vocab} tokens, but tensor token_embd.weight has {spec.vocab} rows")
        chat = _chat_format(file, tokenizer, spec.dialect, config)
        if chat.template is not None:
            opened.callback(chat.template.close)
        devices = open_placement(config)
        for device in devices:
            opened.callback(device.close)
        with _without_draft(LuceError):
            prepared = open_drafter(opened, config, file, spec, devices, context=default_context(spec, config.max_ctx))
        ring = None if prepared is None else prepared.ring
        claims = () if prepared is None else prepared.claims
        with _without_draft(*[OutOfMemoryError] if claims else []):
            backend = open_backend(opened, file, spec, devices, config, on_progress, ring=ring, claims=claims)
        drafter = None
        if prepared is not None:
            try:
                drafter = prepared.open(backend.shards[0], backend.shards[-1])
            except UsageError:
                raise
            except LuceError as error:
                # The layers stay where they are, beside the room that was left for it.
                undrafted = str(error)
                _log.warning(_UNDRAFTED, undrafted)
            else:
                opened.callback(drafter.close)
        tails = None if prepared is None else prepared.tails
        disk = None if directory is None else _disk(directory, file, backend, chat, config)
        kvflash = open_kvflash(opened, backend, devices, config, lambda: tokenizer)
        resources = contextlib.ExitStack()
        parts = ModelParts(
            file=file,
            spec=spec,
            tokenizer=tokenizer,
            chat=chat,
            backend=backend,
            disk=disk,
            kvflash=kvflash,
            drafter=drafter,
            feature_tails=tails,
            draft_device=drafter.device if isinstance(drafter, RemoteDrafter) else None,
            no_drafter_reason=undrafted,
        )
        model = Model(parts, config, resources)
        resources.enter_context(opened.pop_all())
        return model


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
) -> LayerSplitBackend:
    """The backend of a Config on `devices`; `opened` closes it. `on_progress` as in open_model, `ring` and `claims` as
    in LayerSplitBackend."""
    options = serving_options(config, spec, devices, claims)
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
        verify_rows=verified_rows(config),
        rank_pages=ranks_pages(config),
        peer=config.peer_access,
        context=default_context(spec, config.max_ctx),
        chunk=default_chunk(devices, config.chunk),
        kvflash=KVFlashRequest.parse(config.kvflash),
        branch_pages=branch_pages(config),
        layer_split=tuple(config.target_layer_split),
        claims=tuple(claims),
        unpack=config.prompt_weights == "auto",
    )


def open_kvflash(
    opened: contextlib.ExitStack,
    backend: LayerSplitBackend,
    devices: Sequence[Device],
    config: Config,
    tokenizer: Callable[[], Tokenizer],
) -> KVFlash | None:
    """What is to stay on the devices, and how much host memory the rest may take; None where all stays.

    `opened` closes the policy. `tokenizer`: of the model, for policies that read. Raises UsageError, ModelError and
    DeviceError where --kvflash-drafter cannot be used at all.
    """
    if backend.capacity.max_resident_pages is None:
        return None
    budget = config.kvflash_host_mb << 20 or host_memory().free // 2
    policy = open_policy(config, backend, partial(_scorer, opened, config, tokenizer, devices), budget)
    opened.callback(policy.close)
    return KVFlash(policy, tail_pages(backend.spec.tail), config.kvflash_tau, budget)


def _check_cache_ram(config: Config) -> None:
    """Raises UsageError for more than this machine has: it would be taken, until some process is ended for it."""
    there = host_memory().total >> 20
    elsewhere = any("/" in device for device in (*config.target_devices, config.target_device))
    if config.cache_ram > max(there, Config.cache_ram) and not elsewhere:
        raise UsageError(
            f"{flag('cache_ram')} {config.cache_ram}: this machine has {there} MiB of memory", param="cache_ram"
        )


def _chat_format(file: GGUFFile, tokenizer: Tokenizer, dialect: Dialect, config: Config) -> ChatFormat:
    source: str | None = file.metadata.string("tokenizer.chat_template", default=None)
    origin = f"{file.paths[0]}: tokenizer.chat_template"
    error: type[LuceError] = ModelError
    if config.chat_template is not None:
        origin, error = f"--chat-template {config.chat_template}", UsageError
        try:
            source = config.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(f"{origin}: {problem}", param="chat_template") from None
    if source is None:
        return ChatFormat(None, tokenizer, dialect)
    bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    return ChatFormat(ChatTemplate(source, bos=bos, eos=eos, origin=origin, error=error), tokenizer, dialect)


def _scorer(
    opened: contextlib.ExitStack, config: Config, tokenizer: Callable[[], Tokenizer], devices: Sequence[Device]
) -> Callable[[], DraftScorer]:
    """What loads the drafter that scores pages, beside the last layers or as near as can be.

    Raises UsageError, ModelError, DeviceError for a file or a device that cannot be used at all.
    """
    path = Path(config.kvflash_drafter or config.draft).expanduser()
    file = opened.enter_context(open_gguf(path))
    spec = read_spec(Source(str(path), file.metadata, file.tensors))
    theirs = Tokenizer(file.metadata, nfc=spec.nfc, eos_texts=spec.eos)
    own = [device for device in devices if not device.remote]
    device = own[-1] if own else opened.enter_context(contextlib.closing(open_device(named(["cpu:0"])[0])))
    ours = tokenizer()
    return partial(DraftScorer, file, spec, device, None if theirs.alike(ours) else Retokenizer(ours, theirs))


def _disk(directory: Path, file: GGUFFile, backend: LayerSplitBackend, chat: ChatFormat, config: Config) -> DiskTier:
    """The prefix cache's directory."""
    resident = backend.capacity.max_resident_pages
    meaning = {
        "format": str(manifest.FORMAT),
        "--cache-type-k": config.cache_type_k,
        "--cache-type-v": config.cache_type_v,
        # Behind a sequence's first so many pages, what is computed depends on them.
        "--kvflash": "off" if resident is None else f"{resident} pages",
    }
    if config.shard_activations != "f32":
        # What layers of daemons keep follows from values of fewer bits.
        meaning["--shard-activations"] = config.shard_activations
    if config.kv_cache_placement == "exact":
        layers = (f"{part.device} {part.layers.start}..{part.layers.stop - 1}" for part in backend.devices)
        meaning["--kv-cache-placement exact"] = ", ".join(layers)
    texts = {"the chat template": "" if chat.template is None else chat.template.source}
    record = directory / "contents.json"
    known = fingerprint.recorded_digest(file.paths, record) is not None

    def identify() -> Fingerprint:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        contents = fingerprint.recorded_digest(file.paths, record) or fingerprint.content_digest(file.paths, record)
        return Fingerprint.of(contents, meaning, texts)

    disk = DiskTier(
        directory, budget=config.kv_cache_budget << 20, identify=identify, known=known, layers=backend.capacity.layers
    )
    chat.memory.look_up = disk.reply_tokens
    return disk
