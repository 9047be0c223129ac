"""llama.cpp's own endpoints, which editors use: /completion and /infill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from luce.api import Model
from luce.compress.compressor import CompressedPrompt
from luce.config.sampling import SAMPLERS, SamplingParams
from luce.server.answer import answer
from luce.server.errors import invalid
from luce.server.native_request import InfillRequest, NativeRequest
from luce.server.native_response import NativeDetails, NativeResponse
from luce.server.prepare import Job, ended_by_fim, gap_ids, request_job, session_key, text_ids, token_texts
from luce.server.prompt_reader import PromptReader
from luce.server.schema import decode
from luce.server.state import SERVER
from luce.text.fim import Gap
from luce.text.prompt_limit import PromptLimit

Request = TypeVar("Request", bound=NativeRequest)

# llama.cpp's samplers that are off here whether a request names them or not.
_OFF = frozenset({"dry", "typ_p", "top_n_sigma", "xtc", "infill", "adaptive_p"})
#: its other values turn samplers off
_DEFAULTS = SamplingParams()
_SPELLINGS = {"typical_p": "typ_p", "temp": "temperature"}
#: 32 bits of ones, by which llama.cpp asks for a random seed too
_RANDOM_SEEDS = (-1, 2**32 - 1)
#: digits of a token's id, leading zeros included
_LONGEST_ID = 40


async def completion(request: web.Request) -> web.StreamResponse:
    """POST /completion."""
    return await answer(request, partial(request.app[SERVER].text_work, native_job), NativeResponse)


async def infill(request: web.Request) -> web.StreamResponse:
    """POST /infill."""
    return await answer(request, partial(request.app[SERVER].text_work, infill_job), NativeResponse)


def native_job(
    body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False
) -> Job:
    """The Job of a /completion body. Raises RequestError, also soon after `stopped` has become true."""
    request, unknown = decode(body, NativeRequest)
    if request.prompt is None:
        raise invalid("prompt", "is required")
    session = session_key(request, headers)
    reader = PromptReader(request, model, stopped, max_tokens=_longest(request), session=session)
    sent, listed = _prompts(request.prompt, model)
    prompts = tuple(_prompt(item, model, reader.limit) for item in sent)
    return _job(request, unknown, headers, model, tuple(map(reader.read, prompts)), listed=listed)


def infill_job(
    body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False
) -> Job:
    """The Job of an /infill body. Raises as native_job."""
    request, unknown = decode(body, InfillRequest)
    for field in ("input_prefix", "input_suffix"):
        if getattr(request, field) is None:
            raise invalid(field, "is required")
    files = tuple((file.filename, file.text) for file in request.input_extra or ())
    gap = Gap(f"{request.input_prefix}{request.prompt or ''}", str(request.input_suffix), files)
    reader = PromptReader(request, model, stopped, whole=True)
    prompt = reader.read(gap_ids(gap, "input_prefix", model, reader.limit))
    return _job(ended_by_fim(request, model), unknown, headers, model, (prompt,), listed=False)


def _job(
    request: NativeRequest,
    unknown: int,
    headers: Mapping[str, str],
    model: Model,
    prompts: tuple[CompressedPrompt, ...],
    *,
    listed: bool,
) -> Job:
    request = _plain(request, model)
    longest = _longest(request)
    job = request_job(
        request,
        unknown,
        headers,
        model,
        prompts=prompts,
        echoes=(),
        max_tokens=longest,
        logprobs=request.n_probs or None,
    )
    texts = () if job.stream else tuple("".join(token_texts(prompt.ids, model)) for prompt in prompts)
    details = NativeDetails(texts, listed or job.n > 1, bool(request.return_tokens), request.response_fields)
    return replace(job, details=details)


def _longest(request: NativeRequest) -> int | None:
    """Most tokens of the reply; None: no limit."""
    longest = request.max_tokens if request.n_predict is None else request.n_predict
    return None if longest == -1 else longest


def _plain(request: Request, model: Model) -> Request:
    """The request with Luce's values for what llama.cpp spells otherwise."""
    changed: dict[str, Any] = {}
    if request.repeat_last_n == -1:
        changed["repeat_last_n"] = model.context
    if getattr(request, "seed") in _RANDOM_SEEDS:  # noqa: B009  (SAMPLERS defines the field)
        changed["seed"] = None
    if request.n_cmpl is not None:
        changed["n"] = request.n_cmpl
    if request.samplers is not None:
        changed |= _unnamed_off(request.samplers)
    if request.logit_bias is not None:
        changed["logit_bias"] = _biases(request.logit_bias, model)
    return msgspec.structs.replace(request, **changed)


def _unnamed_off(sent: list[str]) -> dict[str, Any]:
    """The values that turn off the samplers that a request does not name."""
    samplers = {_group(name) for name, row in SAMPLERS.items() if row.setting is not None}
    names = {_SPELLINGS.get(name, name) for name in sent}
    if unknown := names - samplers - _OFF:
        raise invalid("samplers", f"unknown sampler {min(unknown)[:40]!r}")
    off = {name: getattr(_DEFAULTS, name) for name in SAMPLERS if _group(name) in samplers - names}
    # 0 is greedy; 1 leaves the distribution as it is.
    return off | ({"temperature": 1.0} if "temperature" in off else {})


def _group(name: str) -> str:
    """llama.cpp's sampler that has a sampling value."""
    return "penalties" if name.endswith("_penalty") else name


def _biases(sent: Mapping[str, float] | list[tuple[int | str, float]], model: Model) -> dict[int, float]:
    """By id. A key is an id or a text, which stands for each of its tokens; false bans them."""
    found: dict[int, float] = {}
    for key, bias in sent.items() if isinstance(sent, Mapping) else sent:
        if bias is True:
            raise invalid("logit_bias", "expected numbers or false")
        if isinstance(key, int) or (key.isascii() and key.isdigit()):
            if isinstance(key, str) and len(key) > _LONGEST_ID:
                # Python reads no number of thousands of digits.
                raise invalid("logit_bias", f"{key[:40]}... is no token id")
            ids = [int(key)]
        else:
            ids = model.tokenizer.encode(key, specials=True)
        found |= dict.fromkeys(ids, -100.0 if bias is False else float(bias))
    return found


def _prompts(prompt: str | list[Any], model: Model) -> tuple[list[str | list[Any]], bool]:
    """The prompts, each a text or a list of texts and ids, and whether they came as a list of prompts.

    A list of texts is several prompts; one that has an id, and no list, is one prompt.
    """
    if isinstance(prompt, str):
        return [prompt], False
    if any(type(item) is int for item in prompt) and not any(isinstance(item, list) for item in prompt):
        return [prompt], False
    if not 0 < len(prompt) <= model.config.max_batch_prompts:
        raise invalid("prompt", f"expected 1..{model.config.max_batch_prompts} prompts, got {len(prompt)}")
    return prompt, True


def _prompt(sent: str | list[Any], model: Model, limit: PromptLimit) -> list[int]:
    """The ids of a prompt; BOS goes in front of one that begins with a text."""
    if isinstance(sent, str):
        return text_ids(sent, model, limit)
    vocab = model.tokenizer.vocab
    ids: list[int] = []
    if not isinstance(sent, list) or not sent:
        raise invalid("prompt", "expected text, token ids, or a list of both")
    for i, part in enumerate(sent):
        limit.check(len(ids))
        if type(part) is int and 0 <= part < vocab:
            ids.append(part)
        elif isinstance(part, str):
            model.tokenizer.refuse_long(part, limit)
            ids += model.tokenizer.encode(part, specials=True, limit=limit, before=len(ids))
            ids = ids if i else model.tokenizer.with_bos(ids)
        else:
            raise invalid("prompt", f"expected texts and token ids in 0..{vocab - 1}")
    if not ids:
        raise invalid("prompt", "has no tokens")
    return ids
