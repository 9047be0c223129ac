"""Request bodies: decoding, types and ranges. Known fields are checked strictly, unknown ones ignored and counted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from luce.config.sampling import SAMPLERS, Sampler
from luce.decoders import json_decoder
from luce.errors import RequestError, TooLargeError
from luce.server.json_size import too_many
from luce.server.unserved import CHAT, COMPLETION, UNSERVED, refuse_unserved, with_unserved
from luce.text.collector import COLLECTOR_OFF

_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Budget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Alternatives = Annotated[int, Meta(ge=0, le=20)]
Share = Annotated[float, Meta(gt=0, le=1)]
CompressionMode = Literal["off", "auto", "always"]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
_Json = dict[str, Any]


class StreamOptions(msgspec.Struct):
    """`stream_options`; obfuscation is accepted without effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """One message of a conversation. `content` as an object is a tool's result."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[str | _Json] | _Json | None = None
    name: str | None = None
    tool_calls: list[_Json] | None = None
    tool_call_id: str | None = None
    function_call: _Json | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


Choice = Literal["none", "auto", "required"]


class AllowedTools(msgspec.Struct):
    """A choice among some of the tools."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[_Json] = []


class ToolChoice(msgspec.Struct):
    """`tool_choice` as an object: a named function, or `allowed_tools`. `function_call` as one has `name` alone."""

    type: Literal["function", "allowed_tools"] = "function"
    function: _Json | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None


# Efforts in the spellings of OpenAI, OpenRouter and Lucebox.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "x-high", "extra_high", "max"]


class Reasoning(msgspec.Struct):
    """`reasoning`, as in OpenAI's Responses and OpenRouter. A summary is accepted without effect."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: _Count | None = None
    summary: str | None = None


class Thinking(msgspec.Struct):
    """`thinking`, as in Anthropic's API."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: _Count | None = None
    reply_budget: _Count | None = None


class CustomParams(msgspec.Struct):
    """`custom_params`, as in SGLang. -1: no budget."""

    thinking_budget: _Budget | None = None


class CacheScope(msgspec.Struct, forbid_unknown_fields=True):
    """`prefix_cache`: the part of a request that may be cached for others. Unknown fields are refused: clients rely on
    them."""

    scope: str | int | None = None
    window: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    ttl_s: Any = None
    pin: Any = None


def _type(sampler: Sampler) -> Any:
    """The type of a sampling value's field, with its range."""
    low, high = sampler.low, sampler.high
    return Annotated[sampler.kind, Meta(gt=low, le=high) if sampler.above else Meta(ge=low, le=high)] | None


if TYPE_CHECKING:
    Sampling = msgspec.Struct
else:
    # `max_tokens` has another lowest value in each endpoint.
    Sampling = with_unserved(
        msgspec.defstruct(
            "Sampling",
            [
                (key, _type(sampler), None)
                for name, sampler in SAMPLERS.items()
                for key in (name, *sampler.aliases)
                if name != "max_tokens"
            ],
            kw_only=True,
        ),
        UNSERVED,
    )


class Common(Sampling, kw_only=True):
    """Fields of both endpoints, with those of SAMPLERS. None is the same as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[_Count], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    n: _Positive | None = None
    best_of: _Positive | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] | None = None
    prefix_cache: CacheScope | None = None
    cache_prompt: bool | None = None
    prefill_compression: CompressionMode | None = None
    keep_ratio: Share | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: _Json | None = None
    extra_body: _Json | None = None
    # Accepted without effect.
    service_tier: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    response_format: _Json | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None


if TYPE_CHECKING:
    ChatFields = Common
    CompletionFields = Common
else:
    ChatFields = with_unserved(Common, CHAT)
    CompletionFields = with_unserved(Common, COMPLETION)


class ChatRequest(ChatFields, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Message] | None = None
    max_completion_tokens: _Positive | None = None
    max_tokens: _Positive | None = None
    max_output_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None
    tools: list[_Json] | None = None
    tool_choice: Choice | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[_Json] | None = None
    function_call: Choice | ToolChoice | None = None
    chat_template_kwargs: _Json | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    # How the reply shows its reasoning, in the spellings of Luce and llama.cpp, of SGLang and of OpenRouter.
    reasoning_format: Literal["separate", "inline", "drop", "auto", "deepseek", "none"] | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    # Budgets of the reasoning in the spellings of vLLM, llama.cpp and SGLang.
    thinking_token_budget: _Budget | None = None
    thinking_budget_tokens: _Budget | None = None
    custom_params: CustomParams | None = None
    # Accepted without effect.
    prediction: _Json | None = None
    verbosity: str | None = None


class CompletionRequest(CompletionFields, kw_only=True):
    """The body of /v1/completions. `prompt`: text, texts, ids, or lists of ids."""

    prompt: str | list[Any] | None = None
    suffix: str | None = None
    max_tokens: _Count | None = None
    echo: bool | None = None
    logprobs: _Alternatives | None = None


class TokenizeRequest(ChatRequest, kw_only=True):
    """The body of /tokenize: llama.cpp's `content`, or vLLM's `prompt` or a chat."""

    content: str | list[str | int] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

# An escaped pair of surrogates, a lone one, a NUL, or any other escape (so that `\\ud800` does not count as one).
_ESCAPES = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|(\\u0000)|\\."
)
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


def decode(body: bytes, kind: type[Body]) -> tuple[Body, int]:
    """A checked body and the number of fields that Luce does not know.

    Raises RequestError with `param`, also for a field that Luce knows and does not serve.

    Lone surrogates become U+FFFD and NULs are removed: both occur in texts that agents collect, and tokenizers take
    neither.
    """
    if what := too_many(body):
        raise TooLargeError(f"the request body has {what}")
    try:
        request, unknown = _decode(body, kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, "") from None
    refuse_unserved(request)
    return request, unknown


class NamedModel(msgspec.Struct):
    """The fields of all bodies that tell which model to load, and how to wait for it. Those of one endpoint are checked
    later."""

    model: str | None = None
    stream: Any = None


def named_model(body: bytes) -> NamedModel:
    """What a body says of its model. Raises as `decode`."""
    return decode(body, NamedModel)[0]


def converted(value: Any, kind: type[Body], where: str) -> Body:
    """A decoded JSON value of the field `where`, checked. Raises RequestError with `param`."""
    # Builds what msgspec knows of the type.
    json_decoder(kind)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, where) from None


def _refusal(error: msgspec.ValidationError, where: str) -> RequestError:
    # msgspec has the path only in its message, always in this form.
    found = _PATH.search(str(error))
    path = found[1] if found else ""
    param = where + ("." if where and path and not path.startswith("[") else "") + path
    why = str(error)[: found.start()] if found else str(error)
    return RequestError(f"{param or 'request body'}: {why}", param=param or None, code="invalid_value")


def _decode(body: bytes, kind: type[Body]) -> tuple[Body, int]:
    try:
        if b"\\u0000" in body:
            body = _cleaned(body)
        try:
            return _typed(body, kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if b"\\u" not in body:
                raise
            return _typed(_cleaned(body), kind)
    except RecursionError:
        raise RequestError("request body: JSON is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"request body: not UTF-8: {error.reason}", code="invalid_json") from None
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise RequestError(f"request body: {error}", code="invalid_json") from None


def _typed(body: bytes, kind: type[Body]) -> tuple[Body, int]:
    """Builds the fields that Luce knows; the others are skipped, and counted from their names unless the body has very
    many values."""
    with COLLECTOR_OFF:
        request = json_decoder(kind).decode(body)
        names = _NAMES.decode(body) if body.count(b",") < _MOST_NAMED else {}
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    return request, sum(name not in known for name in names)


# Commas of a body whose names are counted.
_MOST_NAMED = 100_000
_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _cleaned(body: bytes) -> bytes:
    """The body without escaped NULs, and with U+FFFD for lone surrogates."""
    parts, copied = [], 0
    at = body.find(b"\\")
    # Not one `sub`: that stops all other threads for seconds.
    while at >= 0:
        escape = _ESCAPES.match(body, at)
        end = at + 1 if escape is None else escape.end()
        if escape is not None and (escape[2] or escape[3]):
            parts += [body[copied:at], rb"\ufffd" if escape[2] else b""]
            copied = end
        at = body.find(b"\\", end)
    return b"".join([*parts, body[copied:]])
