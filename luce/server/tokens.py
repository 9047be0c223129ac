"""/tokenize, /detokenize and /apply-template: what the server makes of texts, tokens and conversations.

They need no device and no slot. Fields and replies are those of llama.cpp, and of vLLM where a request has its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from luce.api import Model
from luce.server.answer import prepared, received
from luce.server.chat_prompt import chat_prompt, chat_text
from luce.server.errors import invalid
from luce.server.prepare import served_name, token_texts
from luce.server.schema import ChatRequest, DetokenizeRequest, TokenizeRequest, decode
from luce.server.state import SERVER
from luce.text.prompt_limit import PromptLimit

_Json = dict[str, Any]
_Answer = tuple[_Json | bytes, int]

# Fields that belong to only some of the fields that hold what is tokenised.
_OPTIONS = {
    "add_special": ("content",),
    "parse_special": ("content",),
    "with_pieces": ("content",),
    "add_special_tokens": ("prompt",),
    "return_token_strs": ("prompt", "messages"),
}


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize."""
    return await _answered(request, tokenized)


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    return await _answered(request, detokenized)


async def apply_template(request: web.Request) -> web.Response:
    """POST /apply-template."""
    return await _answered(request, rendered)


async def _answered(
    request: web.Request, compute: Callable[[bytes, Mapping[str, str], Model, Callable[[], bool]], _Answer]
) -> web.Response:
    """The response of a function that computes it from a body, on a thread on which templates may be waited for."""
    server = request.app[SERVER]

    def encoded(*args: Any) -> tuple[bytes, int]:
        value, unknown = compute(*args)
        return msgspec.json.encode(value), unknown

    async with received(request, devices=False) as (body, model):
        answer, unknown = await prepared(request, partial(server.chat_work, encoded), body, model)
    server.metrics.unknown_fields.inc(unknown)
    return web.Response(body=answer, content_type="application/json")


def tokenized(
    body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False
) -> _Answer:
    """The tokens of `content` (llama.cpp), or of `prompt` or `messages` (vLLM), and the number of unknown fields."""
    request, unknown = decode(body, TokenizeRequest)
    served_name(request.model, model)
    named = [name for name in ("content", "prompt", "messages") if getattr(request, name) is not None]
    if len(named) != 1:
        raise invalid(named[1] if named else "content", "expected one of content, prompt and messages")
    (source,) = named
    for option, sources in _OPTIONS.items():
        if getattr(request, option) is not None and source not in sources:
            raise invalid(option, f"goes with {' or '.join(sources)}, not with {source}")
    limit = PromptLimit(model.context, stopped)
    if request.content is not None:
        ids = _mixed(request.content, model, limit, specials=request.parse_special is not False)
        ids = model.tokenizer.with_bos(ids) if request.add_special else ids
        if request.with_pieces:
            return {"tokens": [{"id": token, "piece": _piece(token, model)} for token in ids]}, unknown
        return {"tokens": ids}, unknown
    if request.prompt is not None:
        ids = _mixed(request.prompt, model, limit, specials=True)
        ids = ids if request.add_special_tokens is False else model.tokenizer.with_bos(ids)
    else:
        ids = chat_prompt(request, model, limit)
    spellings = [model.tokenizer.spelling(token) for token in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.context, "tokens": ids, "token_strs": spellings}, unknown


def detokenized(
    body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False
) -> _Answer:
    """The text of tokens, under llama.cpp's name and under vLLM's, and the number of unknown fields."""
    request, unknown = decode(body, DetokenizeRequest)
    served_name(request.model, model)
    if request.tokens is None:
        raise invalid("tokens", "is required")
    _check_ids("tokens", request.tokens, model)
    PromptLimit(model.context, stopped).check(len(request.tokens))
    text = "".join(token_texts(request.tokens, model))
    return {"content": text, "prompt": text}, unknown


def rendered(
    body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False
) -> _Answer:
    """The prompt of a chat as text, and the number of unknown fields."""
    request, unknown = decode(body, ChatRequest)
    served_name(request.model, model)
    return {"prompt": chat_text(request, model, PromptLimit(model.context, stopped))}, unknown


def _mixed(value: str | list[str | int], model: Model, limit: PromptLimit, *, specials: bool) -> list[int]:
    """The ids of a text, or of a list of texts and ids."""
    ids: list[int] = []
    for part in [value] if isinstance(value, str) else value:
        limit.check(len(ids))
        if isinstance(part, int):
            _check_ids("content", [part], model)
            ids.append(part)
        else:
            model.tokenizer.refuse_long(part, limit)
            ids += model.tokenizer.encode(part, specials=specials, limit=limit, before=len(ids))
    return ids


def _check_ids(param: str, ids: list[int], model: Model) -> None:
    vocab = model.tokenizer.vocab
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        raise invalid(param, f"expected token ids in 0..{vocab - 1}")


def _piece(token: int, model: Model) -> str | list[int]:
    """The text of a token, that of a control token too; its bytes where they are no whole characters."""
    try:
        return model.tokenizer.token_bytes(token).decode() or model.tokenizer.spelling(token)
    except UnicodeDecodeError:
        return list(model.tokenizer.token_bytes(token))
