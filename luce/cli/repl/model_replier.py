"""Replies of the model in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from luce.api import Generation, Model
from luce.cli.repl.replier import Ending, Messages, Replier, Reply, Request
from luce.config.sampling import SAMPLERS
from luce.config.settings import sampling_default
from luce.engine.events import Token
from luce.errors import RequestError, UsageError
from luce.text.chat import ChatFormat
from luce.text.effort import EFFORT, NONE, SWITCHES, ReasoningRequest, has_switch
from luce.text.reasoning import Delta, Splitter

_MIB = 2**20


class ModelReply(Reply):
    """The reply of a generation. `splitter` separates its reasoning; None: it has none."""

    def __init__(self, generation: Generation, splitter: Splitter | None, prompt: int | None) -> None:
        self._generation = generation
        self._splitter = splitter
        self.prompt = prompt
        #: the token of the last delta; None behind the last token
        self.token: Token | None = None

    def __next__(self) -> Delta:
        self.token = token = next(self._generation, None)
        if token is not None:
            self.tokens += 1
            return self._split(token.text)
        if self.ending is not None:
            raise StopIteration
        self._end()
        finish = self._generation.finish
        # Text that a deadline cut off, and what the splitter held back.
        last = self._split("" if finish is None else finish.text)
        held = Delta("") if self._splitter is None else self._splitter.flush()
        return Delta(last.content + held.content, last.reasoning + held.reasoning)

    def close(self) -> None:
        """Cancel the reply. Idempotent."""
        self._generation.close()
        self._end()

    def _split(self, text: str) -> Delta:
        return Delta(text) if self._splitter is None else self._splitter.push(text)

    def _end(self) -> None:
        finish = self._generation.finish
        if finish is None or self.ending is not None:
            return
        timings = finish.timings
        self.ending = Ending(
            finish.reason.value,
            tokens=timings.predicted_tokens,
            prompt=self.prompt,
            cached=timings.cached_tokens,
            tier=timings.cache_tier,
            drafted=timings.drafted,
            accepted=timings.accepted,
            draft_state=timings.draft_state,
            details=(
                f"seed {finish.seed}",
                f"queued {timings.queued:.3f} s",
                f"prompt {timings.prompt:.3f} s",
                f"reply {timings.predicted:.3f} s",
                f"drafted {timings.drafted:,}, accepted {timings.accepted:,}",
                f"cache {timings.cache_tier}",
            ),
        )


class ModelReplier(Replier):
    """Answers with a loaded model, which its owner closes. Raises UsageError if it has no chat template."""

    def __init__(self, model: Model) -> None:
        if model.chat.template is None:
            raise UsageError(f"{model.path}: the file has no chat template; set --chat-template, or use luce run")
        self._model = model
        self._source = model.chat.template.source
        self.name = model.name
        self.context: int | None = model.context

    def reply(self, messages: Messages, request: Request, on_progress: Callable[[int, int], None]) -> Reply:
        """As in Replier."""
        self.check(request, "this chat")
        model = self._model
        asked = reasoning_request(model, request.think, "this chat")
        ids = model.chat.prompt(messages, **template_variables(model.chat, asked))
        generation = model.generate(
            ids,
            messages=messages,
            response_format=request.response_format,
            reasoning_budget=model.envelope.budget(asked),
            split=True,
            on_progress=on_progress,
            **request.sampling,
        )
        return ModelReply(generation, model.chat.splitter(ids), len(ids))

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._model.tokenize(text, specials=False))

    def prompt_tokens(self, messages: Messages) -> int:
        """Tokens of a conversation with its template."""
        return len(self._model.chat.prompt(messages, add_generation_prompt=False)) if messages else 0

    def check(self, request: Request, origin: str) -> None:
        """As in Replier."""
        reasoning_request(self._model, request.think, origin)
        check_format(self._model, request.response_format, origin)

    def default(self, name: str) -> Any:
        """As in Replier."""
        value = sampling_default(self._model.config, name)
        return SAMPLERS[name].unset if value is None else value

    def info(self) -> dict[str, Any]:
        """As in Replier."""
        spec = self._model.spec
        return {
            "name": self._model.name,
            "file": str(self._model.path),
            "family": spec.family,
            "layers": len(spec.layers),
            "hidden": f"{spec.hidden:,}",
            "vocabulary": f"{spec.vocab:,}",
            "context": f"{self._model.context:,} of {spec.context_length:,} tokens",
        }

    def template(self) -> str:
        """As in Replier."""
        return self._source

    def devices(self) -> list[dict[str, Any]]:
        """As in Replier."""
        return self._model.placement

    def cache(self) -> dict[str, Any]:
        """As in Replier."""
        stats = self._model.engine.stats().cache
        rows: dict[str, Any] = {
            "in memory": f"{stats.bytes / _MIB:,.1f} of {stats.budget / _MIB:,.0f} MiB",
            "checkpoints": f"{stats.checkpoints:,}",
            "found": f"{stats.hits:,} of {stats.hits + stats.misses:,} prompts, {stats.reused_tokens:,} tokens",
        }
        if stats.disk is None:
            return {**rows, "on disk": "off"}
        disk = stats.disk
        budget = f" of {disk.budget / _MIB:,.0f}" if disk.budget else ""
        rows["on disk"] = f"{disk.bytes / _MIB:,.1f}{budget} MiB, {disk.snapshots:,} snapshots"
        rows["found on disk"] = f"{disk.hits:,} prompts, {disk.reused_tokens:,} tokens"
        return rows

    def close(self) -> None:
        """Nothing: the model has an owner."""


def reasoning_request(model: Model, think: str | int | None, origin: str) -> ReasoningRequest:
    """What Thinking.think asks for, or else `--reasoning`. Raises UsageError that begins with `origin` if the model
    cannot do it."""
    chat = model.chat
    if think is None:
        return model.envelope.unasked
    if isinstance(think, int):
        if chat.reasoning_tokens(()) is None:
            raise UsageError(f"{origin}: think {think}: this model has no marker that ends its reasoning")
        return ReasoningRequest(budget=think, on=True)
    asked = ReasoningRequest(effort=NONE) if think == "off" else ReasoningRequest(on=True)
    if think not in ("on", "off"):
        asked = ReasoningRequest(effort=think, on=True)
        if chat.reads(EFFORT) or chat.reasons:
            return asked
    if not has_switch(chat):
        raise UsageError(f"{origin}: think {think}: the model's chat template has no {' or '.join(SWITCHES)}")
    return asked


def check_format(model: Model, response_format: Mapping[str, Any] | None, origin: str) -> None:
    """Raise UsageError that begins with `origin` for a format that the model's replies cannot have."""
    if response_format is None:
        return
    try:
        model.grammars.constraint(response_format)
    except RequestError as error:
        raise UsageError(f"{origin}: {error}") from None


def template_variables(chat: ChatFormat, asked: ReasoningRequest) -> dict[str, Any]:
    """The variables of a chat template for a request, as far as it reads them."""
    return {name: value for name, value in asked.variables().items() if chat.reads(name)}
