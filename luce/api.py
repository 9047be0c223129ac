"""`luce.load(...)`: a model as a Python object. The command line and the server stand on the same object."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import threadpoolctl
from numpy.typing import NDArray

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.placement import Claim, served_chunk, served_context
from luce.backend.plan import handed_on
from luce.backend.pool import Wanted, tail_pages
from luce.backend.timing import ShardTimes
from luce.cache import fingerprint, manifest
from luce.cache.disk import DiskTier
from luce.cache.fingerprint import Fingerprint
from luce.config.directories import cache_directory
from luce.config.resolve import override, resolve
from luce.config.settings import Config
from luce.draft.drafter import Drafter
from luce.draft.open import branch_pages, open_drafter, verified_rows
from luce.draft.scorer import Scorer
from luce.draft.tails import Tails
from luce.engine.intake import Ticket
from luce.engine.loop import Engine
from luce.engine.policies import open_policy, ranked
from luce.engine.residency import KVFlash
from luce.engine.sequence import (
    Event,
    Failed,
    Finished,
    Progress,
    PromptLogits,
    SamplingParams,
    Token,
    Tokens,
)
from luce.errors import LuceError, ModelError, OutOfMemoryError, UsageError
from luce.gguf.reader import GGUFFile, open_gguf
from luce.hub import resolve_model
from luce.layers.features import FeatureRing
from luce.models.keys import Source
from luce.models.registry import read_spec
from luce.models.spec import Markers, ModelSpec
from luce.ops.kvtype import KVTypes
from luce.remote.open import open_placement
from luce.runtime.device import Device
from luce.runtime.host import host_memory
from luce.runtime.open import named, open_device
from luce.text.bridge import Bridge
from luce.text.chat import ChatFormat
from luce.text.detokenizer import Detokenizer
from luce.text.output import ReplyText
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
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open_gguf(path))
        spec = read_spec(Source(str(path), file.metadata, file.tensors))
        tokenizer = Tokenizer(file.metadata, nfc=spec.nfc, eos_texts=spec.eos)
        if tokenizer.vocab > spec.vocab:
            raise ModelError(f"{path}: {tokenizer.vocab} tokens, but tensor token_embd.weight has {spec.vocab} rows")
        chat = _chat_format(file, tokenizer, spec.dialect.reasoning, config)
        if chat.template is not None:
            opened.callback(chat.template.close)
        devices = open_placement(config)
        for device in devices:
            opened.callback(device.close)
        with _without_draft(LuceError):
            prepared = open_drafter(opened, config, file, spec, devices, context=served_context(spec, config.max_ctx))
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
        disk = _disk(file, backend, chat, config)
        kvflash = open_kvflash(opened, backend, devices, config, lambda: tokenizer)
        held = contextlib.ExitStack()
        model = Model(file, spec, tokenizer, chat, backend, config, held, disk, drafter, tails, kvflash, undrafted)
        held.enter_context(opened.pop_all())
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
    backend = LayerSplitBackend(
        file,
        spec,
        devices,
        weights=config.target_layer_split,
        slots=config.parallel,
        context=served_context(spec, config.max_ctx),
        chunk=served_chunk(devices, config.chunk),
        kv=KVTypes(config.cache_type_k, config.cache_type_v),
        verify=verified_rows(config),
        pool=Wanted.of(config.kvflash),
        ranked=ranked(config),
        branch_pages=branch_pages(config),
        ring=ring,
        claims=claims,
        unpack=config.prompt_weights == "auto",
        peer=config.peer_access,
        on_progress=on_progress,
    )
    opened.callback(backend.close)
    return backend


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
    if backend.bound is None:
        return None
    budget = config.kvflash_host_mb << 20 or host_memory().free // 2
    policy = open_policy(config, backend, partial(_scorer, opened, config, tokenizer, devices), budget)
    opened.callback(policy.close)
    return KVFlash(policy, tail_pages(backend.spec.tail), config.kvflash_tau, budget)


class Generation(Iterator[Token]):
    """The tokens of one reply as they come. Closing it, or dropping the last reference, cancels what is left.

    `finish` is set when the iteration has ended: reason, seed, timings.
    """

    def __init__(
        self, submit: Callable[[Callable[[Event], None]], Ticket], progress: Callable[[int, int], None] | None
    ) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ready: list[Token] = []
        self._progress = progress
        self.finish: Finished | None = None
        self._ticket = submit(self._events.put)

    def __next__(self) -> Token:
        while not self._ready:
            if self.finish is not None:
                raise StopIteration
            event = self._events.get()
            if isinstance(event, Tokens):
                self._ready = list(event.tokens[::-1])
            elif isinstance(event, Finished):
                self.finish = event
                if event.text:
                    self._ready = [Token(-1, event.text)]
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Progress) and self._progress is not None:
                self._progress(event.done, event.total)
        return self._ready.pop()

    def close(self) -> None:
        """Cancel what is left of the reply. Idempotent."""
        self._ticket.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_ticket"):
            self._ticket.cancel()


class Model:
    """A loaded model. Thread-safe; `close` it, or use it as a context manager.

    tokenizer, chat (conversations to ids, if the file has a chat template), engine, spec, config: the parts.
    """

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        backend: LayerSplitBackend,
        config: Config,
        opened: contextlib.ExitStack,
        disk: DiskTier | None = None,
        drafter: Drafter | None = None,
        tails: Tails | None = None,
        kvflash: KVFlash | None = None,
        undrafted: str = "",
    ) -> None:
        self._backend = backend
        self._opened = opened
        self.spec = spec
        self.tokenizer = tokenizer
        self.chat = chat
        self.config = config
        self.path = file.paths[0]
        self.context = backend.context
        self.chunk = backend.chunk
        general = file.metadata.string("general.name", default="")
        self.tokenizer_id = file.metadata.string("tokenizer.ggml.pre", default="default")
        self.name = config.alias[0] if config.alias else general or self.path.stem
        self.fingerprint = _fingerprint(file)
        self.engine = Engine(
            backend,
            eos=tokenizer.eos_ids,
            max_queue=config.max_queue,
            chunk=backend.chunk,
            max_queue_seconds=config.max_queue_seconds,
            timeout=config.timeout,
            cache_bytes=config.cache_ram << 20,
            cache_interval=config.cache_interval,
            disk=disk,
            disk_tokens=config.kv_cache_min_tokens,
            flush_seconds=config.kv_cache_flush_timeout,
            drafter=drafter,
            verify_width=config.verify_width,
            tree=config.ddtree_budget if config.ddtree else None,
            tails=tails,
            kvflash=kvflash,
            undrafted=undrafted,
        )

    @property
    def placement(self) -> list[dict[str, Any]]:
        """device, layers (first, last), bytes of weights, of state, of weights unpacked as well, and bytes per token
        handed on, of each shard."""
        return [
            {
                "device": part.device,
                "layers": [part.layers.start, part.layers.stop - 1],
                "weights": part.weights,
                "unpacked": part.unpacked,
                "state": part.state,
                "handed_on": handed_on(self._backend.spec, part.layers.stop),
            }
            for part in self._backend.parts
        ]

    def down(self) -> str:
        """Why nothing can be generated any more, such as a daemon that has died too often; empty otherwise."""
        return self._backend.down()

    def times(self) -> tuple[ShardTimes, ...]:
        """What the shards' work and the copies between them took since the load."""
        return self._backend.times()

    def tokenize(self, text: str, *, specials: bool = True) -> list[int]:
        """Ids of a text, without an automatic BOS. `specials`: whether texts of control tokens become these tokens."""
        return self.tokenizer.encode(text, specials=specials)

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of ids; control tokens have none, bytes that are no character become U+FFFD."""
        decoder = Detokenizer(self.tokenizer)
        return "".join([decoder.push(int(i)) for i in ids]) + decoder.flush()

    def reply_text(self, stops: Sequence[str] = (), prompt: Sequence[int] = (), *, kept: bool = True) -> ReplyText:
        """The text of one reply to a prompt, cut at the first of the stop strings. `kept`: whether its tokens are
        remembered for later prompts."""
        return ReplyText(self.tokenizer, stops, (lambda reply: self.chat.remember(prompt, reply)) if kept else None)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits at every position: float32 [n, vocab]. Raises ContextError if ids are longer than the context."""
        rows: list[NDArray[np.float32]] = []
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        params = SamplingParams(max_tokens=0, prompt_logits=True)
        ticket = self.engine.submit(ids, params, output=self.reply_text(), on_event=events.put)
        try:
            while not isinstance(event := events.get(), Finished):
                if isinstance(event, PromptLogits):
                    rows.append(event.logits)
                elif isinstance(event, Failed):
                    raise event.error
        finally:
            ticket.cancel()
        return np.concatenate(rows)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Continue a prompt: text (tokenised with its special tokens, BOS in front if the file asks for it) or ids.

        Sampling values that are not given come from the Config. Iterates over tokens with `.id`, `.text`, `.logprob`;
        text that was held back at the end comes as a last token of id -1. `on_progress` gets (done, total) prompt rows.
        """
        if isinstance(prompt, str):
            prompt = self.tokenizer.with_bos(self.tokenizer.encode(prompt, specials=True))
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }
        checked = override(self.config, {k: v for k, v in given.items() if v is not None})
        params = SamplingParams(
            temperature=checked.temperature,
            top_k=checked.top_k,
            top_p=checked.top_p,
            min_p=checked.min_p,
            repetition_penalty=checked.repetition_penalty,
            frequency_penalty=_within("frequency_penalty", frequency_penalty, -2, 2),
            presence_penalty=_within("presence_penalty", presence_penalty, -2, 2),
            logit_bias=dict(logit_bias or {}),
            seed=seed,
            max_tokens=max_tokens if max_tokens is None else int(_within("max_tokens", max_tokens, 0, 2**31)),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        ids, stops = prompt, (stop,) if isinstance(stop, str) else tuple(stop)
        return Generation(
            lambda sink: self.engine.submit(
                ids,
                params,
                output=self.reply_text(stops, ids),
                on_event=sink,
                boundaries=self.chat.boundaries(ids),
            ),
            on_progress,
        )

    def close(self) -> None:
        """Stop generating, release devices and file. Idempotent."""
        self.engine.close()
        self._opened.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _within(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise UsageError(f"{name}: expected a number in [{low}, {high}], got {value!r}", param=name)
    return value


def _chat_format(file: GGUFFile, tokenizer: Tokenizer, reasoning: Markers | None, config: Config) -> ChatFormat:
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
        return ChatFormat(None, tokenizer, reasoning)
    bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    return ChatFormat(ChatTemplate(source, bos=bos, eos=eos, origin=origin, error=error), tokenizer, reasoning)


def _scorer(
    opened: contextlib.ExitStack, config: Config, tokenizer: Callable[[], Tokenizer], devices: Sequence[Device]
) -> Callable[[], Scorer]:
    """What loads the drafter that scores pages, beside the last layers or as near as can be.

    Raises UsageError, ModelError, DeviceError for a file or a device that cannot be used at all.
    """
    path = Path(config.kvflash_drafter or config.draft).expanduser()
    file = opened.enter_context(open_gguf(path))
    spec = read_spec(Source(str(path), file.metadata, file.tensors))
    theirs = Tokenizer(file.metadata, nfc=spec.nfc, eos_texts=spec.eos)
    own = [device for device in devices if not device.shared]
    device = own[-1] if own else opened.enter_context(contextlib.closing(open_device(named(["cpu:0"])[0])))
    ours = tokenizer()
    return partial(Scorer, file, spec, device, None if theirs.alike(ours) else Bridge(ours, theirs))


def _disk(file: GGUFFile, backend: LayerSplitBackend, chat: ChatFormat, config: Config) -> DiskTier | None:
    """The prefix cache's directory, if there is to be one."""
    directory = cache_directory(config)
    if directory is None or not config.cache_ram:
        return None
    meaning = {
        "format": str(manifest.FORMAT),
        "--cache-type-k": config.cache_type_k,
        "--cache-type-v": config.cache_type_v,
        # Behind a sequence's first so many pages, what is computed depends on them.
        "--kvflash": "off" if backend.bound is None else f"{backend.bound} pages",
    }
    texts = {"the chat template": "" if chat.template is None else chat.template.source}
    record = directory / "contents.json"
    known = fingerprint.remembered(file.paths, record) is not None

    def identify() -> Fingerprint:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        contents = fingerprint.remembered(file.paths, record) or fingerprint.content_digest(file.paths, record)
        return Fingerprint.of(contents, meaning, texts)

    disk = DiskTier(
        directory, budget=config.kv_cache_budget << 20, identify=identify, known=known, layers=backend.layers
    )
    chat.memory.elsewhere = disk.recall
    return disk


def _fingerprint(file: GGUFFile) -> str:
    """8 hex digits that change with the tensor directory: names, shapes, types, places."""
    digest = hashlib.blake2b(digest_size=4)
    for tensor in file.tensors.values():
        digest.update(f"{tensor.name} {tensor.shape} {tensor.type} {tensor.offset}\n".encode())
    return digest.hexdigest()
