"""A prompt as the target reads it: whole, or compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from luce.compress.compression_options import Verdict
from luce.compress.compressor import Bounds, CompressedPrompt, Compressor
from luce.compress.scorer import no_check
from luce.compress.selection import PromptTokens, positions_in
from luce.config.prefill_settings import ORIGINAL, RESIDENCY
from luce.config.settings import flag
from luce.engine.events import Event, EventSink, Finished
from luce.errors import UsageError
from luce.text.cut_points import cut_ranks
from luce.text.protected import Message, continues, old_messages, protected
from luce.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CompressionRequest:
    """A request's values for compression; None: those of the settings."""

    #: off, auto or always
    mode: str | None = None
    keep_ratio: float | None = None


_NO_REQUEST = CompressionRequest()
_SHORTENING = (Verdict.COMPRESS, Verdict.FREEZE)


@dataclass(frozen=True)
class PromptCompression:
    """The compression of one model's prompts. `compressor` is None without --prefill-drafter."""

    compressor: Compressor | None
    tokenizer: Tokenizer
    #: tokens of the target's context
    context: int
    #: positions for which the target was trained
    positions: int

    def mode(self, request: CompressionRequest) -> str:
        """off, auto or always. Raises UsageError if a request asks for compression and there is no compressor."""
        if self.compressor is None:
            if request.mode not in (None, "off"):
                raise UsageError(f"{request.mode}: requires {flag('prefill_drafter')}", param="prefill_compression")
            return "off"
        default = self.compressor.options.mode
        return request.mode or ("off" if default == RESIDENCY else default)

    def shortens(self, messages: Sequence[Message], request: CompressionRequest = _NO_REQUEST) -> bool:
        """Whether `read` compresses a prompt that does not fit. Raises as `mode`."""
        mode = self.mode(request)
        if self.compressor is None or mode == "off":
            return False
        verdict = self.compressor.verdict(0, mode, request.keep_ratio, continues=continues(messages), fits=False)
        return verdict in _SHORTENING

    def read(
        self,
        ids: Sequence[int],
        messages: Sequence[Message] = (),
        request: CompressionRequest = _NO_REQUEST,
        *,
        room: int = 1,
        session: str = "",
        check: Callable[[], None] = no_check,
    ) -> CompressedPrompt:
        """A prompt as the target reads it: compressed, or whole.

        `messages`: the conversation from which a chat template made the prompt. `room`: tokens of the context that stay
        free. `session` names the conversation, for its keep ratio. `check`: as in Compressor.compress. Raises the
        errors of `mode` and of Compressor.compress.
        """
        mode, most = self.mode(request), self.context - room
        if self.compressor is None or mode == "off" or not self._known(ids):
            # The engine refuses unknown ids.
            return CompressedPrompt.whole(ids, Verdict.OFF)
        ratio, fits = request.keep_ratio, len(ids) <= most
        sessions = self.compressor.sessions if session and ratio is None else None
        own = ratio if sessions is None else sessions.ratio(session)
        verdict = self.compressor.verdict(len(ids), mode, own, continues=continues(messages), fits=fits)
        old: tuple[tuple[int, int], ...] = ()
        if verdict is Verdict.FREEZE:
            old = old_messages(self.tokenizer, ids, messages, self.compressor.options.freeze_threshold)
            verdict = verdict if old else Verdict.CONTINUATION
        if verdict not in _SHORTENING:
            result = CompressedPrompt.whole(ids, verdict)
        else:
            kept, ranks = protected(self.tokenizer, ids, messages), cut_ranks(self.tokenizer, ids)
            control = np.array([self.tokenizer.is_control(token) for token in ids], np.bool_)
            prompt = PromptTokens(np.asarray(ids, np.int32), kept, ranks, control)
            if old:
                result = self.compressor.freeze(prompt, old, keep_ratio=ratio, check=check)
            else:
                bounds = Bounds(self.context, most)
                result = self.compressor.compress(prompt, bounds, keep_ratio=own, check=check)
                if sessions is not None and result.reached is not None:
                    sessions.observe(session, result.reached)
            # Beyond the trained length the target knows no positions.
            if result.shortened and self.compressor.options.positions == ORIGINAL and len(ids) + room <= self.positions:
                result = replace(result, position_ids=positions_in(result.spans))
        self.compressor.count(result)
        return result

    def room(self, prompt: CompressedPrompt) -> int:
        """Most tokens of a reply to a prompt."""
        room = self.context - len(prompt.ids)
        if prompt.position_ids is not None:
            room = min(room, self.positions - 1 - int(prompt.position_ids[-1]))
        return max(0, room)

    def _known(self, ids: Sequence[int]) -> bool:
        """Whether the vocabulary has all ids, of which there is one at least."""
        return len(ids) > 0 and min(ids) >= 0 and max(ids) < self.tokenizer.vocab

    def observing(self, sink: EventSink) -> EventSink:
        """A sink for a sequence's events that also tells the compressor how long the target read the prompt."""
        compressor = self.compressor
        if compressor is None:
            return sink

        def take(event: Event) -> None:
            if isinstance(event, Finished):
                timings = event.timings
                compressor.observe(timings.prompt_tokens - timings.cached_tokens, timings.prompt)
            sink(event)

        return take
