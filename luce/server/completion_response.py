"""Responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from luce.api import Model
from luce.engine.events import Token
from luce.server.choice import Choice
from luce.server.logprobs import finite
from luce.server.openai_response import OpenAIResponse
from luce.server.prepare import Job, token_texts
from luce.server.response import Json
from luce.server.stream import ServerSentEvent
from luce.text.detokenizer import Detokenizer
from luce.text.reply_parser import Part, TextPart


class _Offsets:
    """Where the text of each token of a reply begins, counted from the echo's first character."""

    def __init__(self, echo: str, decoder: Detokenizer) -> None:
        self._at = len(echo)
        self._decoder = decoder

    def push(self, token: int) -> int:
        """The characters before the next token."""
        before = self._at
        self._at += len(self._decoder.push(token))
        return before


class CompletionResponse(OpenAIResponse):
    """/v1/completions."""

    whole_object = "text_completion"
    prefix = "cmpl-"
    chunk_object = "text_completion"

    def __init__(self, job: Job, model: Model) -> None:
        super().__init__(job, model)
        self._offsets = [_Offsets(choice.echo or "", Detokenizer(model.tokenizer)) for choice in self.choices]

    def _opening(self, index: int) -> Json | None:
        choice = self.choices[index]
        if self._echo_waits(choice):
            return None
        if not choice.echo and not self._job.token_ids:
            return None
        return {**self._chunk_choice(index, (TextPart(choice.echo or ""),)), **self._prompt_ids(choice)}

    def scores(self, index: int) -> Iterable[ServerSentEvent]:
        """The echo, with the log probabilities of the prompt."""
        choice = self.choices[index]
        if self._echo_waits(choice):
            opening = self._chunk_choice(index, (TextPart(choice.echo or ""),))
            yield self._chunk({**opening, "logprobs": self._prompt_logprobs(choice), **self._prompt_ids(choice)})

    def _prompt_ids(self, choice: Choice) -> Json:
        """As vLLM: a request may have several prompts, so each choice has the ids of its own."""
        return {"prompt_token_ids": list(choice.prompt)} if self._job.token_ids else {}

    def _echo_waits(self, choice: Choice) -> bool:
        """Whether the echo waits for the prompt's log probabilities."""
        return choice.echo is not None and self._job.logprobs is not None

    def _chunk_choice(self, index: int, parts: Sequence[Part] | None) -> Json:
        text = "".join([part.text for part in parts or () if isinstance(part, TextPart)])
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> Json:
        offsets = self._offsets[choice.index]
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [offsets.push(token.id) for token in tokens],
        }

    def _top(self, token: Token) -> dict[str, float | None]:
        """The most likely tokens by name, and the chosen one. Of two tokens with one name, the chosen or likelier one
        has it; the other one is `token_id:N`."""
        names = {token.id: self._name(token.id)}
        for i, _ in token.top:
            name = self._name(i)
            names.setdefault(i, f"token_id:{i}" if name in names.values() else name)
        return {names[i]: finite(logprob) for i, logprob in token.top} | {names[token.id]: finite(token.logprob)}

    def _name(self, token: int) -> str:
        r"""The text of a token. OpenAI's form for bytes that are no whole characters is `bytes:\xf0\x9f`."""
        tokenizer = self._model.tokenizer
        try:
            return tokenizer.token_bytes(token).decode() or tokenizer.token_text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))

    def _prompt_logprobs(self, choice: Choice) -> Json:
        texts = token_texts(choice.prompt, self._model)
        if choice.prompt[0] == self._model.tokenizer.bos_id and not (choice.echo or "").startswith(texts[0]):
            texts[0] = ""  # an added BOS is not part of the text
        offsets, at = [], 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": [self._name(token) for token in choice.prompt],
            "token_logprobs": [None, *(finite(token.logprob) for token in choice.scores)],
            "top_logprobs": [None, *(self._top(token) for token in choice.scores)],
            "text_offset": offsets,
        }

    def _whole(self, choice: Choice) -> Json:
        logprobs: Json | None = None
        if self._job.logprobs is not None:
            logprobs = self._logprobs(choice, choice.tokens)
            if choice.echo is not None:
                prompt = self._prompt_logprobs(choice)
                logprobs = {key: prompt[key] + logprobs[key] for key in logprobs}
        return {
            "index": choice.index,
            "text": (choice.echo or "") + choice.content,
            "logprobs": logprobs,
            **self._ids(choice),
            **self._prompt_ids(choice),
        }
