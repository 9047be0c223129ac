"""Responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from luce.engine.events import Token
from luce.server.choice import Choice
from luce.server.prepare import token_texts
from luce.server.response import Json, ResponseBuilder, finite
from luce.text.reasoning import Delta


class CompletionResponse(ResponseBuilder):
    """/v1/completions."""

    whole_object = "text_completion"
    prefix = "cmpl-"
    chunk_object = "text_completion"

    def opening(self, index: int) -> Json | None:
        choice = self.choices[index]
        if self._echo_waits(choice):
            return None
        if not choice.echo and not self._job.token_ids:
            return None
        return self._chunk({**self._chunk_choice(index, Delta(choice.echo or "")), **self._prompt_ids(choice)})

    def scored(self, index: int) -> Json | None:
        choice = self.choices[index]
        if not self._echo_waits(choice):
            return None
        opening = self._chunk_choice(index, Delta(choice.echo or ""))
        return self._chunk({**opening, "logprobs": self._prompt_logprobs(choice), **self._prompt_ids(choice)})

    def _prompt_ids(self, choice: Choice) -> Json:
        """As vLLM: a request may have several prompts, so each choice has the ids of its own."""
        return {"prompt_token_ids": list(choice.prompt)} if self._job.token_ids else {}

    def _echo_waits(self, choice: Choice) -> bool:
        """Whether the echo waits for the prompt's log probabilities."""
        return choice.echo is not None and self._job.logprobs is not None

    def _chunk_choice(self, index: int, delta: Delta | None) -> Json:
        return {"index": index, "text": "" if delta is None else delta.content, "logprobs": None, "finish_reason": None}

    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> Json:
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.push(token.id))
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
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
            "text": choice.content,
            "logprobs": logprobs,
            **self._ids(choice),
            **self._prompt_ids(choice),
        }
