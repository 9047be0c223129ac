"""A Model without weights: the real engine and text code over a scripted backend and a tokenizer of single bytes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from luce.backend.kvflash_size import KVFlashRequest
from luce.backend.measured_devices import MeasuredDevices
from luce.backend.prediction_facts import PredictedPlan
from luce.compress.compressor import Compressor
from luce.config.settings import Config
from luce.draft.drafter import Drafter
from luce.engine.engine_options import EngineOptions
from luce.engine.loop import Engine
from luce.kvcache.paging import KVFlash
from luce.kvcache.policies import AgePolicy
from luce.models.spec import CHATML, Dialect, Markers, ModelSpec, ReasoningBudget
from luce.planner.figures import DeviceFigures, LinkFigures
from luce.planner.prediction import PlacedShard, predict
from luce.planner.problem import HeadWork, LayerWork, Load, ModelWork, Problem
from luce.runtime.device import Memory
from luce.runtime.step import PAGE
from luce.shard.shard import DaemonState
from luce.shard.timing import ShardTimes
from luce.text.chat import ChatFormat
from luce.text.detokenizer import Detokenizer
from luce.text.effort import BudgetEnvelope
from luce.text.grammar import GrammarCompiler
from luce.text.grammar_options import GrammarOptions
from luce.text.output import ReplyText
from luce.text.prompt_compression import PromptCompression
from luce.text.template import ChatTemplate
from luce.text.tokenizer import CONTROL, NORMAL, USER_DEFINED, Tokenizer
from tests.support.scripted_backend import Script, ScriptedBackend, after

START, END, BOS, THINK, THOUGHT = 256, 257, 258, 259, 260
VOCAB = 261
DIALECT = Dialect(Markers("<think>", "</think>"), message=CHATML)
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first and strict %}{{ raise_exception('system goes first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
#: what follows the template's `<|im_start|>assistant\n`
REPLY = "Héllo, wörld 🎉!"


def _spelling() -> list[str]:
    """GPT-2's printable character of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(other)) for byte in range(256)]


def metadata(*, add_bos: bool = False) -> dict[str, object]:
    """The GGUF keys of the tokenizer: token i is the byte i, then three control tokens and two visible ones."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*_spelling(), "<|im_start|>", "<|im_end|>", "<|bos|>", "<think>", "</think>"],
        "tokenizer.ggml.token_type": [NORMAL] * 256 + [CONTROL] * 3 + [USER_DEFINED] * 2,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": add_bos,
    }


class OffLoopTokenizer(Tokenizer):
    """Fails when a text is tokenised on a thread that runs an event loop."""

    def encode(self, text: str, **options: Any) -> list[int]:
        _refuse_loop()
        return super().encode(text, **options)


class OffLoopChat(ChatFormat):
    """Fails when a conversation is rendered on a thread that runs an event loop."""

    def prompt(self, messages: Any, /, **kwargs: Any) -> list[int]:
        _refuse_loop()
        return super().prompt(messages, **kwargs)


def _refuse_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise AssertionError("computed on the event loop")


@functools.cache
def tokenizer(*, add_bos: bool = False) -> Tokenizer:
    """The byte tokenizer."""
    return OffLoopTokenizer(metadata(add_bos=add_bos))


@functools.cache
def chat_format() -> ChatFormat:
    """The template with the byte tokenizer; one for all tests, as each has a child process."""
    return OffLoopChat(ChatTemplate(TEMPLATE, bos="", eos="<|im_end|>"), tokenizer(), DIALECT)


def saying(text: str | Sequence[int], *, marker: str = "<|im_start|>assistant\n", end: bool = True) -> Script:
    """A script that says a text after a marker."""
    ids = list(text.encode() if isinstance(text, str) else text)
    return after(Tokenizer.encode(tokenizer(), marker, specials=True), ids + [END] * end)


def plan() -> PredictedPlan:
    """The prediction of the placement of ScriptedModel."""
    cpu = DeviceFigures("cpu:0", "here", True, 10**9, 1e9, ((1, 1e9),), 1e-6, 1e-5, LinkFigures(0, 1e9))
    layers = (LayerWork(bytes=100, macs=100, launches=1, kv=8, attention=8),) * 4
    work = ModelWork(64, (0, 256, 256, 256), 100, HeadWork(100, 100, 1), layers)
    problem = Problem(work, Load(1, 512, 128), (cpu, replace(cpu, name="cpu:1")), {})
    prediction = predict(problem, [PlacedShard("cpu:0", range(3)), PlacedShard("cpu:1", range(3, 4))])
    assert prediction is not None
    return PredictedPlan(problem, prediction, MeasuredDevices({}))


class ScriptedModel:
    """The attributes of luce.api.Model that the server uses. `backend` is for tests to look at; `drafter`,
    `no_drafter_reason` as for Engine; `vocabulary`: that of `chat`, if it is another one."""

    def __init__(
        self,
        config: Config,
        *,
        script: Script | None = None,
        add_bos: bool = False,
        context: int = 512,
        drafter: Drafter | None = None,
        no_drafter_reason: str = "",
        chat: Callable[[], ChatFormat] = chat_format,
        vocabulary: Tokenizer | None = None,
        compressor: Compressor | None = None,
        budget: ReasoningBudget | None = None,
        original_context: int | None = None,
        **backend: Any,
    ) -> None:
        self.config = config
        self.tokenizer = vocabulary or tokenizer(add_bos=add_bos)
        self.chat = chat()
        self.grammars = GrammarCompiler(self.tokenizer, self.tokenizer.vocab, GrammarOptions.of(config))
        self.name = config.alias[0] if config.alias else "scripted"
        self.path = Path("scripted.gguf")
        self.context = context
        self.compression = PromptCompression(compressor, self.tokenizer, context, context)
        self.recommended_by = "family"
        self.envelope = BudgetEnvelope.of(config, DIALECT.budget if budget is None else budget, context)
        self.chunk = config.chunk or 512
        self.fingerprint = "0123abcd"
        self.tokenizer_id = "default"
        self.spec = ModelSpec("scripted", 64, self.tokenizer.vocab, context, 1e-6, (), tied_head=True, dialect=DIALECT)
        self.placement: list[dict[str, Any]] = [
            {"device": "cpu:0", "layers": [0, 2], "weights": 300, "state": 20, "activation_bytes_per_token": 256},
            {"device": "cpu:1", "layers": [3, 3], "weights": 100, "state": 10, "activation_bytes_per_token": 0},
        ]
        self.plan: PredictedPlan | None = plan()
        pool = KVFlashRequest.parse(config.kvflash)
        self.backend = ScriptedBackend(
            bound=None if pool is None else pool.size // PAGE,
            vocab=self.tokenizer.vocab,
            context=context,
            slots=config.parallel,
            chunk=self.chunk,
            script=saying(REPLY) if script is None else script,
            **{"resumes": pool is None, "recurrent": pool is not None, **backend},
        )
        self.gone = ""
        self.shard_times: tuple[ShardTimes, ...] = ()
        self.left: dict[str, Memory] = {}
        self.shard_daemons: tuple[DaemonState, ...] = ()
        self.engine = Engine(
            self.backend,
            EngineOptions.of(
                config,
                eos=self.tokenizer.eos_ids,
                chunk=self.chunk,
                positions=context,
                original_context=original_context,
                no_drafter_reason=no_drafter_reason,
            ),
            kvflash=None if pool is None else KVFlash(AgePolicy(), 4, config.kvflash_tau, config.kvflash_host_mb << 20),
            drafter=drafter,
        )

    def reply_text(self, *args: Any, **kwargs: Any) -> ReplyText:
        return self.chat.reply_text(*args, **kwargs)

    def detokenize(self, ids: Iterable[int]) -> str:
        decoder = Detokenizer(self.tokenizer)
        return "".join([decoder.push(i) for i in ids]) + decoder.flush()

    def down(self) -> str:
        """As Model.down."""
        return self.gone

    def times(self) -> tuple[ShardTimes, ...]:
        return self.shard_times

    def memory(self) -> dict[str, Memory]:
        return self.left

    def daemons(self) -> tuple[DaemonState, ...]:
        return self.shard_daemons

    def close(self) -> None:
        self.engine.close()
        self.grammars.close()
        self.backend.close()
        assert self.backend.broken is None, self.backend.broken
