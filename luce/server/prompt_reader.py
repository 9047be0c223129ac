"""The prompts of a request as the target reads them: compressed (PFlash), or whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from luce.api import Model
from luce.compress.compression_options import Verdict
from luce.compress.compressor import CompressedPrompt
from luce.errors import UsageError
from luce.server.errors import invalid, unsupported
from luce.server.schema import Common, Message
from luce.text.prompt_compression import CompressionRequest
from luce.text.prompt_limit import PromptLimit

# Most tokens of a prompt that is compressed to fit the context.
_LONGEST = 1 << 20


class PromptReader:
    """Reads the prompts of one request.

    `session` names the conversation. `whole`: none of the prompts is compressed. Raises RequestError if the request
    asks for compression, or for a keep ratio, that it cannot have.
    """

    def __init__(
        self,
        request: Common,
        model: Model,
        stopped: Callable[[], bool],
        *,
        messages: Sequence[Message] = (),
        max_tokens: int | None = None,
        session: str = "",
        whole: bool = False,
    ) -> None:
        self._compression = model.compression
        self._request = CompressionRequest(request.prefill_compression, request.keep_ratio)
        self._messages = [msgspec.structs.asdict(message) for message in messages]
        self._room = int(max_tokens != 0)
        self._session = session
        self._whole = whole
        try:
            self._mode = self._compression.mode(self._request)
        except UsageError as error:
            raise unsupported("prefill_compression", str(error)) from None
        if self._request.keep_ratio is not None and self._mode == "off":
            raise invalid("keep_ratio", "needs prefill_compression: auto or always")
        shortens = not whole and self._compression.shortens(self._messages, self._request)
        #: the limit of a prompt before it is compressed
        self.limit = PromptLimit(max(model.context, _LONGEST) if shortens else model.context, stopped)

    def read(self, ids: Sequence[int]) -> CompressedPrompt:
        """A prompt as the target reads it."""
        if self._whole:
            return CompressedPrompt.whole(ids, Verdict.OFF if self._mode == "off" else Verdict.WHOLE)
        return self._compression.read(
            ids,
            self._messages,
            self._request,
            room=self._room,
            session=self._session,
            check=lambda: self.limit.check(0),
        )


def compression_facts(prompt: CompressedPrompt) -> dict[str, Any] | None:
    """The result of compressing a prompt, for responses; None where compression is off."""
    if prompt.verdict is Verdict.OFF:
        return None
    facts: dict[str, Any] = {
        "result": prompt.verdict.value,
        "original_tokens": prompt.original,
        "effective_tokens": len(prompt.ids),
        "kept": round(len(prompt.ids) / max(1, prompt.original), 4),
        "drafter_ms": round(prompt.seconds * 1000, 3),
        "reused": prompt.reused,
        "positions": "rebased" if prompt.position_ids is None else "original",
    }
    if prompt.covered is not None:
        facts["covered"] = round(prompt.covered, 4)
    return facts | ({"reason": prompt.reason} if prompt.reason else {})
