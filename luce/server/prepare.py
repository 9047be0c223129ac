"""A request body to a Job: prompts as ids, and sampling values. It computes: call it in a worker thread."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from luce.api import Model
from luce.compress.compressor import CompressedPrompt
from luce.config.sampling import SAMPLERS, SamplingParams
from luce.config.settings import sampling_default
from luce.engine.reasoning_limit import ReasoningLimit
from luce.server.chat_prompt import chat_prompt
from luce.server.errors import invalid, unknown_model, unsupported
from luce.server.prompt_reader import PromptReader
from luce.server.schema import ChatRequest, Common, CompletionRequest, decode
from luce.server.shown_reasoning import ReasoningFormat, reasoning_format
from luce.server.structured_output import reply_format
from luce.server.thinking import ReasoningSwitch
from luce.server.tool_choice import NO_INPUTS, ChosenTools, chosen_tools
from luce.text.call_format import CallFormat
from luce.text.call_parser import CallableTools
from luce.text.detokenizer import Detokenizer
from luce.text.fim import Gap, fim_prompt
from luce.text.grammar import CompiledGrammar
from luce.text.prompt_limit import PromptLimit
from luce.text.reasoning import ReasoningTokens
from luce.text.reply_format import ReplyFormat

#: `max_tokens` of /v1/completions when the request has none
COMPLETION_TOKENS = 16

# The logit bias of a token that never comes.
_NEVER = -100.0
_SESSION_HEADERS = ("x-session-id", "x-session-affinity", "session-id", "thread-id", "x-claude-code-session-id")
_LONGEST_SESSION = 256


@dataclass(frozen=True)
class Job:
    """A checked request: `n` replies to each prompt. Choice i is a reply to prompts[i // n]."""

    #: the prompts as the target reads them, of int64, which the engine copies without touching each id
    prompts: tuple[array[int], ...]
    #: the same with how compression made them
    readings: tuple[CompressedPrompt, ...]
    #: of each prompt: lengths at which other prompts may diverge from it
    boundaries: tuple[tuple[int, ...], ...]
    #: the text of each prompt, if the response repeats it before the reply
    echoes: tuple[str, ...]
    n: int
    params: SamplingParams
    stops: tuple[str, ...]
    #: name of the model in the response
    model: str
    #: key of fair queueing, empty without one
    session: str
    #: tokens of each prompt that the prefix cache may hold; None: all, and the reply
    max_cached_tokens: int | None
    #: seconds, 0 for no limit
    timeout: float
    #: number of fields of the body that Luce does not know
    unknown_fields: int
    stream: bool
    include_usage: bool
    #: every chunk of a reply has the usage so far
    running_usage: bool
    #: alternatives per token; None: no log probabilities
    logprobs: int | None
    token_ids: bool
    #: chunks report the progress of the prompt
    progress: bool
    #: every chunk has timings
    running_timings: bool
    #: tools of the body that only the servers of its API could run
    skipped_tools: int = 0
    #: how long the reasoning of each reply may be; None: replies have none
    reasoning: ReasoningLimit | None = None
    #: what the replies must be; None: any text
    reply_format: ReplyFormat | None = None
    #: which calls the replies may hold, or must; None: no grammar holds calls
    call_format: CallFormat | None = None
    #: the compiled grammar of both; None: not compiled yet, or none
    grammar: CompiledGrammar | None = None
    #: the markers of reasoning as the replies of a chat find them; None: replies begin with their format
    reasoning_tokens: ReasoningTokens | None = None
    #: how a chat reply shows its reasoning
    reasoning_format: ReasoningFormat = "separate"
    #: `tool_choice` names the one function to call
    named_tool: bool = False
    #: the prompt is a chat's: the model's ReplyParser divides the replies
    chat: bool = False
    #: the tools that the replies may call; None: what looks like a call is text
    tools: CallableTools | None = None
    #: what only the ResponseBuilder of the body's API reads
    details: object = None

    @property
    def choices(self) -> int:
        """Number of replies."""
        return len(self.prompts) * self.n


def chat_job(body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False) -> Job:
    """The Job of a /v1/chat/completions body. Raises RequestError, also soon after `stopped` has become true."""
    request, unknown = decode(body, ChatRequest)
    return chat_request_job(request, unknown, headers, model, stopped, limit=model.envelope.default_max_tokens)


def chat_request_job(
    request: ChatRequest,
    unknown: int,
    headers: Mapping[str, str],
    model: Model,
    stopped: Callable[[], bool] = lambda: False,
    *,
    inputs: Mapping[str, ReplyFormat] = NO_INPUTS,
    limit: int | None = None,
) -> Job:
    """The Job of a chat, whichever API's body it comes from; `unknown` fields of that body are no field of Luce.
    `inputs` as in chosen_tools; `limit`: most tokens of a reply without a limit of its own. Raises as chat_job."""
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    if request.modalities not in (None, ["text"]):
        raise unsupported("modalities", 'only ["text"] is supported')
    limits = (request.max_completion_tokens, request.max_tokens, request.max_output_tokens)
    max_tokens = next((given for given in limits if given is not None), limit)
    session = session_key(request, headers)
    reader = PromptReader(
        request, model, stopped, messages=request.messages or (), max_tokens=max_tokens, session=session
    )
    read = reader.read(chat_prompt(request, model, reader.limit))
    prompt = read.ids
    room = model.compression.room(read)
    asked = ReasoningSwitch(request, model.chat, model.envelope.unasked).asked
    job = request_job(
        request,
        unknown,
        headers,
        model,
        prompts=(read,),
        echoes=(),
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    tools = chosen_tools(request, parallel=model.chat.calls.parallel, inputs=inputs)
    if tools.required and job.reply_format is not None:
        raise invalid("tool_choice", f"the reply follows {job.reply_format.param}, and cannot consist of calls")
    room = room if max_tokens is None else min(room, max_tokens)
    owed = job.reply_format is not None or tools.required
    if owed and model.chat.reasons_without_end(prompt):
        raise unsupported(
            "tool_choice" if job.reply_format is None else job.reply_format.param,
            "this model's vocabulary has no token that ends the reasoning, which its prompt begins; turn it off",
        )
    job = replace(
        job,
        chat=True,
        reasoning_format=reasoning_format(request, model.config.reasoning_format),
        named_tool=tools.named,
        reasoning=model.envelope.limit(model.chat, prompt, room, asked, owed=owed),
        reasoning_tokens=model.chat.reasoning_tokens(prompt),
    )
    return _with_tools(job, tools, model)


def _with_tools(job: Job, tools: ChosenTools, model: Model) -> Job:
    """The job with the tools that its replies may call, and the tokens that begin and end calls."""
    chat, params = model.chat, job.params
    trigger = chat.trigger
    if tools.forbidden and trigger is not None:
        # Models go on calling tools when the conversation has calls.
        params = replace(params, logit_bias={**params.logit_bias, trigger: _NEVER})
    if tools.callable is None:
        return replace(job, params=params)
    params = replace(params, stop_token_ids=params.stop_token_ids | chat.call_ends)
    reasoning = job.reasoning
    if reasoning is not None and trigger is not None:
        reasoning = replace(reasoning, closers=reasoning.closers | {trigger})
    config = model.config
    # A reply that follows a format is calls instead, or the format: a grammar tells where calls begin.
    mode = "on" if job.reply_format is not None else config.tool_grammar
    form = tools.call_format(chat.calls, exact=chat.exact_calls, mode=mode, strict=config.strict_schemas)
    return replace(job, params=params, reasoning=reasoning, tools=tools.callable, call_format=form)


def named_for(job: Job, field: Callable[[str], str]) -> Job:
    """The job whose formats name the fields of another API's body; `field`: of a chat request's field."""
    form, calls = job.reply_format, job.call_format
    if form is not None:
        form = replace(form, param=field(form.param))
    if calls is not None:
        calls = replace(calls, tools=tuple(replace(tool, param=field(tool.param)) for tool in calls.tools))
    return replace(job, reply_format=form, call_format=calls)


def completion_job(
    body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False
) -> Job:
    """The Job of a /v1/completions body. Raises as chat_job."""
    request, unknown = decode(body, CompletionRequest)
    if request.suffix and request.echo:
        raise unsupported("echo", "a reply that fills a gap does not repeat its prompt")
    sent = _prompt_list(request.prompt, model)
    # A reply that fills a gap needs the text around it, and an echo all log probabilities.
    reader = PromptReader(
        request,
        model,
        stopped,
        max_tokens=request.max_tokens,
        session=session_key(request, headers),
        whole=bool(request.suffix or request.echo),
    )
    limit = reader.limit
    if request.suffix:
        prompts = tuple(gap_ids(Gap(item, request.suffix), "suffix", model, limit) for item in sent)
        request = ended_by_fim(request, model)
    else:
        prompts = tuple(text_ids(item, model, limit) if isinstance(item, str) else item for item in sent)
    echoes = tuple(
        item if isinstance(item, str) else "".join(token_texts(item, model)) for item in sent if request.echo
    )
    return request_job(
        request,
        unknown,
        headers,
        model,
        prompts=tuple(map(reader.read, prompts)),
        echoes=echoes,
        max_tokens=COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
    )


def token_texts(ids: Sequence[int], model: Model) -> list[str]:
    """The text that each token of a prompt adds, control tokens by their name."""
    decoder = Detokenizer(model.tokenizer)
    found = []
    for token in ids:
        text = decoder.push(token)
        found.append(model.tokenizer.token_text(token) if model.tokenizer.is_control(token) else text)
    if found:
        found[-1] += decoder.flush()
    return found


def names(model: Model) -> tuple[str, ...]:
    """The names of the model; responses use the first."""
    return model.config.alias or (model.name,)


def served_name(requested: str | None, model: Model) -> str:
    """The model name of the response. Raises NotFoundError for an unknown one with --strict-model."""
    if requested in names(model):
        return str(requested)
    if requested is not None and model.config.strict_model:
        raise unknown_model(requested)
    return names(model)[0]


def request_job(
    request: Common,
    unknown: int,
    headers: Mapping[str, str],
    model: Model,
    *,
    prompts: tuple[CompressedPrompt, ...],
    echoes: tuple[str, ...],
    max_tokens: int | None,
    logprobs: int | None,
) -> Job:
    """The Job of prompts, with what a request says in the fields of all endpoints. Raises RequestError."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise invalid("stream_options", "needs stream: true")
    n = request.n or 1
    if request.best_of not in (None, n):
        raise unsupported("best_of", "only the value of n is supported")
    if n > model.config.max_n:
        raise invalid("n", f"expected at most {model.config.max_n}")
    stop = request.stop or []
    name = served_name(request.model, model)
    return Job(
        prompts=tuple(array("q", prompt.ids) for prompt in prompts),
        readings=prompts,
        boundaries=tuple(model.chat.boundaries(prompt.ids) for prompt in prompts),
        echoes=echoes,
        n=n,
        params=_sampling(request, model, max_tokens, logprobs, scored=bool(echoes)),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        model=name,
        session=session_key(request, headers),
        max_cached_tokens=_max_cached_tokens(request),
        timeout=request.timeout_s or 0.0,
        unknown_fields=unknown,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        running_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        logprobs=logprobs,
        token_ids=bool(request.return_token_ids),
        progress=bool(request.return_progress),
        running_timings=bool(request.timings_per_token),
        reply_format=reply_format(request, strict=model.config.strict_schemas),
    )


def _sampling(
    request: Common, model: Model, max_tokens: int | None, logprobs: int | None, *, scored: bool
) -> SamplingParams:
    vocab = model.tokenizer.vocab
    values: dict[str, Any] = {"max_tokens": max_tokens}
    for name, sampler in SAMPLERS.items():
        if name not in values:
            sent = (getattr(request, key) for key in (name, *sampler.aliases))
            values[name] = next((value for value in sent if value is not None), sampling_default(model.config, name))
    if max_tokens is not None and values["min_tokens"] > max_tokens:
        raise invalid("min_tokens", f"exceeds the limit of {max_tokens} tokens")
    bias, stop_ids = request.logit_bias or {}, request.stop_token_ids or []
    for param, ids in (("logit_bias", bias), ("stop_token_ids", stop_ids)):
        if not all(0 <= token < vocab for token in ids):
            raise invalid(param, f"expected token ids in 0..{vocab - 1}")
    return SamplingParams(
        **values,
        logit_bias=bias,
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=logprobs if scored else None,
    )


def _max_cached_tokens(request: Common) -> int | None:
    """Job.max_cached_tokens, from `prefix_cache`. The cache always finds common prefixes, so `auto` means `full`."""
    if request.cache_prompt is False:
        return 0
    options = request.prefix_cache
    if options is None:
        return None
    for name in ("ttl_s", "pin"):
        if getattr(options, name) is not None:
            raise unsupported(f"prefix_cache.{name}", "not supported: the least useful checkpoint goes first")
    scope = str("auto" if options.scope is None else options.scope).lower()
    if scope in ("off", "none", "disabled"):
        return 0
    if scope in ("full", "full-prefix", "auto"):
        return None
    found = re.fullmatch(r"(auto:)?([0-9]{1,7})", scope)
    if found is None or not 1 <= int(found[2]) <= 1_000_000:
        raise invalid("prefix_cache.scope", "expected off, full, auto, auto:N or N, with N in 1..1000000")
    return None if found[1] else int(found[2])


def session_key(request: Common, headers: Mapping[str, str]) -> str:
    """The session of a request, from the first header or field that names one; empty without a name."""
    fields = (
        request.session_id,
        (request.extra_body or {}).get("session_id"),
        request.prompt_cache_key,
        (request.metadata or {}).get("user_id"),
        request.user,
    )
    found = next((value for value in (*(headers.get(name) for name in _SESSION_HEADERS), *fields) if value), "")
    return str(found)[:_LONGEST_SESSION]


# --- plain prompts


def _prompt_list(prompt: str | list[Any] | None, model: Model) -> list[str | list[int]]:
    """The prompts of a /v1/completions body, each text or checked ids."""
    if prompt is None:
        raise invalid("prompt", "is required")
    items: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if items and all(type(item) is int for item in items):
        items = [items]
    if not 0 < len(items) <= model.config.max_batch_prompts:
        raise invalid("prompt", f"expected 1..{model.config.max_batch_prompts} prompts, got {len(items)}")
    texts = all(isinstance(item, str) for item in items)
    if not texts and not all(isinstance(item, list) and item for item in items):
        raise invalid("prompt", "expected text, texts, token ids or lists of token ids")
    vocab = model.tokenizer.vocab
    for ids in () if texts else items:
        if not all(type(token) is int and 0 <= token < vocab for token in ids):
            raise invalid("prompt", f"expected token ids in 0..{vocab - 1}")
    return items


def text_ids(text: str, model: Model, limit: PromptLimit) -> list[int]:
    """The prompt of a text, with its special tokens, and BOS if the file asks for one. Raises RequestError."""
    model.tokenizer.refuse_long(text, limit)
    ids = model.tokenizer.with_bos(model.tokenizer.encode(text, specials=True, limit=limit))
    if not ids:
        raise invalid("prompt", "has no tokens")
    return ids


def gap_ids(gap: Gap, param: str, model: Model, limit: PromptLimit) -> list[int]:
    """The prompt for what fills a gap. Raises RequestError that names `param` if the model has no tokens for it."""
    tokenizer = model.tokenizer
    if tokenizer.fim is None:
        raise unsupported(param, "the vocabulary of this model has no fill-in-the-middle tokens")
    return tokenizer.with_bos(fim_prompt(gap, tokenizer.fim, tokenizer, limit))


Request = TypeVar("Request", bound=Common)


def ended_by_fim(request: Request, model: Model) -> Request:
    """The request with the tokens that end what fills a gap among its stop tokens."""
    fim = model.tokenizer.fim
    ends = frozenset() if fim is None else fim.ends
    return msgspec.structs.replace(request, stop_token_ids=sorted({*(request.stop_token_ids or ()), *ends}))
