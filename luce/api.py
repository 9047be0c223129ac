"""A loaded model as a Python object, which the command line and the server use too."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luce.backend.layersplit import LayerSplitBackend
from luce.backend.prediction_facts import PredictedPlan
from luce.compress.compressor import Compressor
from luce.config.sampling import SAMPLERS, SamplingParams
from luce.config.settings import Config, flag, sampling_default
from luce.draft.drafter import Drafter
from luce.draft.feature_tail import FeatureTails
from luce.engine.admission import SequenceHandle
from luce.engine.engine_options import EngineOptions
from luce.engine.events import Event, Failed, Finished, Progress, PromptLogits, Token, Tokens
from luce.engine.loop import Engine
from luce.errors import ContextError, UsageError
from luce.gguf.reader import GGUFFile
from luce.kvcache.disk.tier import DiskTier
from luce.kvcache.paging import KVFlash
from luce.models.model_card import Recommended
from luce.models.spec import ModelSpec
from luce.remote.device import RemoteDevice
from luce.remote.shard import daemon_state
from luce.runtime.device import Memory
from luce.shard.shard import DaemonState
from luce.shard.sizes import activation_bytes
from luce.shard.timing import ShardTimes
from luce.text.call_parser import CallableTools
from luce.text.chat import ChatFormat
from luce.text.detokenizer import Detokenizer
from luce.text.effort import BudgetEnvelope, ReasoningRequest
from luce.text.grammar import GrammarCompiler
from luce.text.grammar_options import GrammarOptions
from luce.text.output import ReplyText
from luce.text.prompt_compression import PromptCompression
from luce.text.protected import Message
from luce.text.vocabulary import Vocabulary

#: seconds that measuring what drafts cost may take before the first reply.
MEASURED_SECONDS = 5.0


class Generation(Iterator[Token]):
    """Iterates over the tokens of one reply while they are generated. `close`, or the end of the last reference to it,
    cancels the reply.

    Text that was held back until the reply's end comes with the last token. `finish` (reason, seed, timings) is set
    together with that token. Where no token ends the reply but a deadline, the text held back is `finish.text`.
    """

    def __init__(
        self, submit: Callable[[Callable[[Event], None]], SequenceHandle], progress: Callable[[int, int], None] | None
    ) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ready: deque[Token] = deque()
        self._progress = progress
        self._last: Finished | Failed | None = None
        self.finish: Finished | None = None
        self._handle = submit(self._events.put)

    def __next__(self) -> Token:
        while not self._ready and self._last is None:
            self._take(self._events.get())
        if isinstance(self._last, Finished) and len(self._ready) <= 1:
            self.finish = self._last
        if self._ready:
            return self._ready.popleft()
        if isinstance(self._last, Failed):
            raise self._last.error
        raise StopIteration

    def _take(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._ready.extend(event.tokens)
            if event.ends:
                # The engine has sent the last event as well.
                self._take(self._events.get())
        elif isinstance(event, Finished):
            if self._ready and event.text:
                token = self._ready.pop()
                self._ready.append(replace(token, text=token.text + event.text))
                event = replace(event, text="")
            self._last = event
        elif isinstance(event, Failed):
            self._last = event
        elif isinstance(event, Progress) and self._progress is not None:
            self._progress(event.done, event.total)

    def close(self) -> None:
        """Cancel the reply. Idempotent."""
        self._handle.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._handle.cancel()


@dataclass(frozen=True)
class ModelParts:
    """Everything that luce.assembly opens for a model."""

    file: GGUFFile
    spec: ModelSpec
    vocabulary: Vocabulary
    #: conversations to ids, if the file has a chat template
    chat: ChatFormat
    backend: LayerSplitBackend
    disk: DiskTier | None = None
    kvflash: KVFlash | None = None
    drafter: Drafter | None = None
    #: how fast the placement is; None without figures of its devices
    plan: PredictedPlan | None = None
    #: compresses prompts; None without --prefill-drafter
    compressor: Compressor | None = None
    feature_tails: FeatureTails | None = None
    #: gets the draft rows that a sequence's step verified and accepted
    on_verified: Callable[[int, int], None] | None = None
    #: the devices in daemons of their own, by what they hold: draft, prefill_drafter
    draft_devices: Mapping[str, RemoteDevice] = field(default_factory=dict)
    #: why there is no drafter although one is wanted; empty otherwise
    no_drafter_reason: str = ""
    #: why the model cannot move to other devices behind running replies; empty: it can
    immovable: str = ""
    #: what is recommended where nobody has set anything, and what finds it anew; None: nothing
    recommended: Recommended | None = None
    recommend: Callable[[], Recommended] | None = None


class Model:
    """A loaded model. Thread-safe; `close` it, or use it as a context manager."""

    def __init__(self, parts: ModelParts, config: Config, resources: contextlib.ExitStack) -> None:
        """`resources` are released by `close`."""
        backend, file, tokenizer = parts.backend, parts.file, parts.vocabulary.tokenizer
        self.backend = backend
        #: how fast the placement is; None without figures of its devices
        self.plan = parts.plan
        self._draft_devices = parts.draft_devices
        self._resources = resources
        self._closing = threading.RLock()
        #: the devices of the last move
        self._placement = contextlib.ExitStack()
        #: why the model cannot move to other devices behind running replies; empty: it can
        self.immovable = parts.immovable
        self.spec = parts.spec
        self.tokenizer = tokenizer
        self.chat = parts.chat
        self.grammars = GrammarCompiler(
            tokenizer, parts.spec.vocab, GrammarOptions.of(config), parts.vocabulary.grammars
        )
        self.config = config
        self.path = file.paths[0]
        self.context = backend.capacity.context
        positions = parts.spec.context_length
        self.compression = PromptCompression(parts.compressor, tokenizer, self.context, positions)
        self.chunk = backend.options.chunk
        self.tokenizer_id = file.metadata.string("tokenizer.ggml.pre", default="default")
        self.name = config.alias[0] if config.alias else file.name
        self._recommended, self._recommend = parts.recommended, parts.recommend
        #: the budgets of the reasoning of replies
        self.envelope = BudgetEnvelope.of(config, parts.spec.dialect.budget, self.context)
        self.fingerprint = _fingerprint(file)
        self.engine = Engine(
            backend,
            EngineOptions.of(
                config,
                eos=tokenizer.eos_ids,
                chunk=backend.options.chunk,
                positions=parts.spec.context_length,
                original_context=parts.spec.original_context,
                no_drafter_reason=parts.no_drafter_reason,
            ),
            disk=parts.disk,
            kvflash=parts.kvflash,
            drafter=parts.drafter,
            feature_tails=parts.feature_tails,
            on_verified=parts.on_verified,
        )

    @property
    def placement(self) -> list[dict[str, Any]]:
        """For each shard: device; layers (first, last); weights, unpacked (the second, unpacked form of weights) and
        state in bytes; the layers whose routed experts lie on the CPU (experts_on_cpu), and their bytes there;
        activation_bytes_per_token to the next shard."""
        return [
            {
                "device": part.device,
                "layers": [part.layers.start, part.layers.stop - 1],
                "weights": part.weights,
                "unpacked": part.unpacked,
                "state": part.state,
                "experts_on_cpu": list(part.offloaded),
                "experts_on_cpu_bytes": part.offloaded_bytes,
                "activation_bytes_per_token": activation_bytes(
                    self.backend.spec, part.layers.stop, self.backend.options.captured
                ),
            }
            for part in self.backend.devices
        ]

    @property
    def recommended_by(self) -> str:
        """Where sampling and budgets come from that nobody set: a model card, the file, or the family."""
        return "family" if self._recommended is None else self._recommended.source

    def read_card(self) -> Recommended | None:
        """What the model card recommends now, if that has changed. Raises UsageError for a card that cannot be read."""
        found = None if self._recommend is None else self._recommend()
        return None if found == self._recommended else found

    def take_card(self, found: Recommended) -> None:
        """Use a result of `read_card` for later requests."""
        sampling = {name: getattr(found.config, name) for name, row in SAMPLERS.items() if row.setting is not None}
        self.config, self.spec = replace(self.config, **sampling), found.spec
        self.chat.set_budget(found.spec.dialect.budget)
        self.envelope = BudgetEnvelope.of(self.config, found.spec.dialect.budget, self.context)
        self._recommended = found

    def moved(self, plan: PredictedPlan | None, devices: contextlib.ExitStack) -> None:
        """Note that the backend has moved to these devices, which `devices` closes."""
        self.plan = plan
        self._placement.close()
        self._placement = devices

    def down(self) -> str:
        """Why no reply can be generated any more, such as a daemon that has died too often; empty otherwise."""
        return self.backend.down()

    def memory(self) -> dict[str, Memory]:
        """Memory of each shard's device and of drafters' daemons at the last measurement, by the device's name.

        Devices without a measurement are left out.
        """
        seen = {str(device.name): device.reported_memory() for device in self._draft_devices.values()}
        return {name: memory for name, memory in seen.items() if memory is not None} | self.backend.memory()

    def daemons(self) -> tuple[DaemonState, ...]:
        """The daemons of shards, and those of drafters."""
        drafts = self._draft_devices.items()
        return *self.backend.daemons(), *(daemon_state(what, str(each.name), each.daemon) for what, each in drafts)

    def times(self) -> tuple[ShardTimes, ...]:
        """Seconds of the shards' work and of the copies between them since the load."""
        return self.backend.times()

    def warm_up(self) -> None:
        """Measure what drafts cost, generate one token, which builds kernels and graphs, and prepare grammars. No
        counter counts it, and no cache keeps it. Before the first reply."""
        self.grammars.warm_up()
        self.engine.measure_drafting(MEASURED_SECONDS)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        prompt = [self.tokenizer.bos_id or 0]
        output = self.reply_text(remember=False)
        for _ in Generation(
            lambda sink: self.engine.submit(prompt, params, output=output, on_event=sink, max_cached_tokens=0), None
        ):
            pass
        self.engine.reset_counters()

    def tokenize(self, text: str, *, specials: bool = True) -> list[int]:
        """Ids of a text, without an automatic BOS. `specials`: whether texts of control tokens become these tokens."""
        return self.tokenizer.encode(text, specials=specials)

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of ids. Control tokens have no text; bytes that form no character become U+FFFD."""
        decoder = Detokenizer(self.tokenizer)
        return "".join([decoder.push(int(i)) for i in ids]) + decoder.flush()

    def reply_text(
        self,
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        remember: bool = True,
        split: bool = False,
        tools: CallableTools | None = None,
    ) -> ReplyText:
        """The text of one reply to a prompt. Arguments are those of ChatFormat.reply_text."""
        return self.chat.reply_text(stops, prompt, remember=remember, split=split, tools=tools)

    def logits(self, ids: Sequence[int], position_ids: NDArray[np.int32] | None = None) -> NDArray[np.float32]:
        """Logits at every position: float32 [n, vocab]. `position_ids`: as for Engine.submit.

        Raises ContextError if ids are longer than the context.
        """
        rows: list[NDArray[np.float32]] = []
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        params = SamplingParams(max_tokens=0, prompt_logits=True)
        handle = self.engine.submit(
            ids, params, output=self.reply_text(), on_event=events.put, position_ids=position_ids
        )
        try:
            while not isinstance(event := events.get(), Finished):
                if isinstance(event, PromptLogits):
                    rows.append(event.logits)
                elif isinstance(event, Failed):
                    raise event.error
        finally:
            handle.cancel()
        return np.concatenate(rows)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        reasoning_budget: int | None = None,
        split: bool = False,
        messages: Sequence[Message] = (),
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: float | None,
    ) -> Generation:
        """Continue a prompt: text (tokenised with its special tokens, BOS in front if the file asks for it) or ids.

        `sampling` are values of luce.config.sampling.SAMPLERS (temperature, top_k, seed, ...); a value that is None or
        absent is the Config's default. Raises UsageError for a value outside its range, TypeError for an unknown
        name.

        `response_format` is OpenAI's: {"type": "json_object"}, or json_schema with a schema that the reply, behind its
        reasoning, then follows. Raises RequestError for a schema that cannot be enforced.

        `reasoning_budget`: most tokens of the reasoning, which Luce ends then; the Config's think_max_tokens holds too.

        `split`: the text of the tokens is for `chat.splitter(prompt)`, which separates reasoning and content; without
        it, control tokens have no text, also those between the messages of a reply.

        `messages`: the conversation from which `chat.prompt` made the prompt; prefill_compression keeps the user's last
        message, and all of a prompt that continues a conversation.

        Iterates over tokens with `.id`, `.text`, `.logprob`. `on_progress` gets (done, total) prompt rows.
        """
        if isinstance(prompt, str):
            prompt = self.tokenizer.with_bos(self.tokenizer.encode(prompt, specials=True))
        params = SamplingParams(
            max_tokens=max_tokens,
            logit_bias=dict(logit_bias or {}),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            **self._sampling(sampling),
        )
        if max_tokens is not None and not 0 <= max_tokens <= 2**31:
            raise UsageError(f"max_tokens: expected a number in [0, {2**31}], got {max_tokens!r}", param="max_tokens")
        ids = (read := self.compression.read(prompt, messages, room=int(max_tokens != 0))).ids
        constraint = None
        if response_format is not None:
            constraint = self.grammars.constraint(response_format, self.chat.reasoning_tokens(ids))
        room = min(self.compression.room(read), 2**31 if max_tokens is None else max_tokens)
        asked = ReasoningRequest(budget=reasoning_budget)
        reasoning = self.envelope.limit(self.chat, ids, room, asked, owed=constraint is not None)

        def submit(sink: Callable[[Event], None]) -> SequenceHandle:
            try:
                return self.engine.submit(
                    ids,
                    params,
                    output=self.reply_text((stop,) if isinstance(stop, str) else tuple(stop), ids, split=split),
                    on_event=self.compression.observing(sink),
                    position_ids=read.position_ids,
                    boundaries=self.chat.boundaries(ids),
                    constraint=constraint,
                    reasoning=reasoning,
                )
            except ContextError:
                raise self._overflow(len(ids)) from None

        return Generation(submit, on_progress)

    def _overflow(self, tokens: int) -> ContextError:
        """The error for a prompt that does not fit: what to set, which clients over HTTP cannot."""
        trained = self.spec.longest_context
        advice = f"shorten it: the model was trained for {trained:,} tokens"
        if self.context < trained:
            advice = f"shorten it, or raise {flag('max_ctx')} (the model was trained for {trained:,} tokens)"
        return ContextError(
            f"the prompt has {tokens:,} tokens and the context {self.context:,}: {advice}", param="max_ctx"
        )

    def _sampling(self, sampling: Mapping[str, float | None]) -> dict[str, Any]:
        """The sampling values of a call, except max_tokens, which is an argument of `generate`."""
        if unknown := sampling.keys() - SAMPLERS:
            raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
        values = {}
        for name, sampler in SAMPLERS.items():
            value = sampling.get(name)
            try:
                values[name] = sampling_default(self.config, name) if value is None else sampler.parse(str(value))
            except ValueError as error:
                raise UsageError(f"{name}: {error}, got {str(value)!r}", param=name) from None
        del values["max_tokens"]
        return values

    def close(self) -> None:
        """Stop generating, release devices and file. Idempotent."""
        # One thread after the other: a second one would close devices whose shards the first one still closes.
        with self._closing:
            self.engine.close()
            self.grammars.close()
            self.backend.close()
            self._placement.close()
            self._resources.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _fingerprint(file: GGUFFile) -> str:
    """8 hex digits that change with the tensor directory: names, shapes, types, offsets."""
    digest = hashlib.blake2b(digest_size=4)
    for tensor in file.tensors.values():
        digest.update(f"{tensor.name} {tensor.shape} {tensor.type} {tensor.offset}\n".encode())
    return digest.hexdigest()
