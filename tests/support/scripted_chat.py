"""A Model for the command line: it gives scripted replies and records its prompts.

`python -m tests.support.scripted_chat [--plain] [--continue]` is a chat with it, for tests with a pseudo-terminal.
"""

from __future__ import annotations

import json
import queue
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from luce.cli.chat import Options, talk
from luce.cli.repl.model_replier import ModelReplier
from luce.config.settings import Config
from luce.engine.events import Finished, FinishReason, Timings, Token
from luce.errors import LuceError
from luce.kvcache.disk.stats import DiskStats
from luce.kvcache.prefix_cache import CacheStats
from luce.models.spec import Markers, ReasoningBudget
from luce.text.effort import BudgetEnvelope
from luce.text.reasoning import ReasoningSplitter, ReasoningTokens

#: a piece of a reply after which the model generates nothing more and does not end
HANG = object()


class ScriptedChat:
    """The ids of a prompt are the bytes of its messages as JSON. Records the `variables` of the template."""

    def __init__(self) -> None:
        self.template: Any = SimpleNamespace(source="{{ messages }}{{ enable_thinking }}")
        self.variables: list[dict[str, Any]] = []
        #: whether the vocabulary has the markers of reasoning
        self.marked = True

    def prompt(self, messages: Sequence[Any], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        if add_generation_prompt:
            self.variables.append(variables)
        return list(json.dumps(messages).encode())

    def splitter(self, prompt: Sequence[int]) -> ReasoningSplitter:
        return ReasoningSplitter(Markers("<think>", "</think>"))

    @property
    def reasons(self) -> bool:
        return self.template is not None and "<think>" in self.template.source

    def reads(self, name: str) -> bool:
        return self.template is not None and name in re.findall(r"\w+", self.template.source)

    def reasoning_tokens(self, prompt: Sequence[int]) -> ReasoningTokens | None:
        return ReasoningTokens(1, 2, inside=False) if self.marked else None


class ScriptedGeneration(Iterator[Token]):
    def __init__(self, pieces: Sequence[Any], prompt: int, pause: float, held: str = "") -> None:
        self._pieces = iter(pieces)
        self._held = held
        self._prompt = prompt
        self._pause = pause
        self._count = 0
        self.finish: Finished | None = None
        self.closed = False

    def __next__(self) -> Token:
        piece = next(self._pieces, None)
        if piece is HANG:
            queue.SimpleQueue[Token]().get()
        if isinstance(piece, LuceError):
            raise piece
        if piece is None:
            timings = Timings(
                prompt_tokens=self._prompt,
                predicted_tokens=self._count,
            )
            reason = FinishReason.DEADLINE if self._held else FinishReason.EOS
            self.finish = Finished(reason, self._held, timings, 7)
            raise StopIteration
        time.sleep(self._pause)
        self._count += 1
        return Token(self._count, piece)

    def close(self) -> None:
        self.closed = True


class ScriptedModel:
    """Gives `replies` in order: each a text, or its pieces. Records `prompts` and `options`. Says once that
    half of a prompt is read."""

    def __init__(self, *replies: str | Sequence[Any], pause: float = 0.0, config: Config | None = None) -> None:
        self._replies = list(replies)
        self._pause = pause
        #: text that a deadline cuts off behind each reply's last token
        self.held = ""
        self.config = config or Config()
        self.chat = ScriptedChat()
        self.name = "scripted"
        self.path = Path("scripted.gguf")
        self.context = 4096
        self.envelope = BudgetEnvelope.of(self.config, ReasoningBudget(usual_tokens=4096 + 800), self.context)
        self.spec = SimpleNamespace(family="llama", layers=(1, 2), hidden=64, vocab=256, context_length=8192)
        self.placement = [{"device": "cpu:0", "layers": [0, 1], "weights": 3 << 20, "state": 1 << 20}]
        self.prompts: list[list[dict[str, str]]] = []
        self.options: list[dict[str, Any]] = []
        self.generations: list[ScriptedGeneration] = []
        disk = DiskStats(bytes=3 << 20, budget=1 << 30, snapshots=2, hits=1, reused_tokens=812)
        stats = CacheStats(bytes=1 << 20, budget=4 << 30, checkpoints=5, hits=3, misses=1, disk=disk)
        self.engine = SimpleNamespace(stats=lambda: SimpleNamespace(cache=stats))

    def tokenize(self, text: str, *, specials: bool = True) -> list[int]:
        return list(text.encode())

    def generate(
        self,
        ids: Sequence[int],
        *,
        split: bool,
        on_progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> ScriptedGeneration:
        # The text of a chat's reply is for its splitter.
        assert split or self.chat.template is None
        self.prompts.append(json.loads(bytes(ids)))
        # The conversation that the prompt was made of, by which a compression knows what to keep.
        assert list(options.pop("messages")) == self.prompts[-1]
        form = options.pop("response_format", None)
        if options["reasoning_budget"] is None:
            del options["reasoning_budget"]
        self.options.append(options if form is None else options | {"response_format": form})
        if on_progress is not None:
            on_progress(4, 8)
        reply = self._replies.pop(0)
        if isinstance(reply, str):
            reply = [reply[i : i + 3] for i in range(0, len(reply), 3)]
        self.generations.append(ScriptedGeneration(reply, len(ids), self._pause, self.held))
        return self.generations[-1]


class LoadedModel(ScriptedModel):
    """As `open_model` returns it."""

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Echo(ScriptedModel):
    """Replies with the last message; to `hang` with one word and no end, to `silent` with nothing, to `slow` with many
    words, to `think` with reasoning, to `ponder` with reasoning that has no end."""

    SCRIPTS: ClassVar[dict[str, list[Any]]] = {
        "hang": ["begun", HANG],
        "silent": [HANG],
        "slow": ["word "] * 10000,
        "think": ["<think>", "first ", "thought\n", "second", "</think>", "so it is"],
        "ponder": ["<think>", "first ", "thought\n", "second", " and third", HANG],
    }

    def generate(self, ids: Sequence[int], **options: Any) -> ScriptedGeneration:
        last = json.loads(bytes(ids))[-1]["content"]
        self._replies = [self.SCRIPTS.get(last, f"you said **{last}**")]
        if last == "silent":
            print("(asked)", flush=True)
        self._pause = {"slow": 0.01, "ponder": 0.1}.get(last, 0.0)
        return super().generate(ids, **options)


if __name__ == "__main__":
    raise SystemExit(talk(ModelReplier(Echo()), Options(plain="--plain" in sys.argv, resume="--continue" in sys.argv)))  # type: ignore[arg-type]
