"""Fields of other servers' APIs that Luce does not serve: a request that asks for what they do is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from luce.server.errors import unsupported


@dataclass(frozen=True)
class Unserved:
    """A field that is refused, and why."""

    why: str
    #: values that ask for nothing; null never does
    neutral: tuple[Any, ...] = ()
    #: the type of its values
    kind: Any = Any


_SAMPLER = "Luce does not have this sampler"
_STOP_TEXT = "a reply ends before its stop text"
_LORA = "Luce does not load LoRA adapters"
_Share = Annotated[float, Meta(ge=0, le=1)]

#: of every body that generates: what vLLM, SGLang and llama.cpp serve beside OpenAI's fields
UNSERVED: dict[str, Unserved] = {
    "typical_p": Unserved("only the neutral value 1 is supported", (1.0,), _Share),
    "top_n_sigma": Unserved("only the neutral value -1 is supported", (-1.0, 0.0), float),
    "xtc_probability": Unserved("only the neutral value 0 is supported", (0.0,), _Share),
    "dry_multiplier": Unserved("only the neutral value 0 is supported", (0.0,), float),
    "top_a": Unserved(_SAMPLER, (0,), float),
    "tfs_z": Unserved(_SAMPLER, (1,), float),
    "adaptive_target": Unserved(_SAMPLER, (-1,), float),
    "mirostat": Unserved(_SAMPLER, (0,), int),
    "dynatemp_range": Unserved(_SAMPLER, (0,), float),
    "min_keep": Unserved("not supported", (0, 1), int),
    "use_beam_search": Unserved("replies are sampled token by token", (False,), bool),
    "logits_processors": Unserved("Luce runs no code of a request", ([],)),
    "custom_logit_processor": Unserved("Luce runs no code of a request", ("",)),
    "bad_words": Unserved("not supported; logit_bias bans tokens", ([],)),
    "allowed_token_ids": Unserved("not supported; guided_choice, regex and grammar say what a reply may be"),
    "structural_tag": Unserved("not supported; tool_choice, response_format and grammar hold a reply to a form"),
    "grammar_lazy": Unserved("a grammar holds a reply from its first token on", (False,), bool),
    "repetition_detection": Unserved("not supported; repetition_penalty acts against repetitions"),
    "stop_regex": Unserved("not supported; stop ends a reply at a text, regex describes all of it"),
    "include_stop_str_in_output": Unserved(_STOP_TEXT + "; finish_details.stop names it", (False,), bool),
    "no_stop_trim": Unserved(_STOP_TEXT + "; finish_details.stop names it", (False,), bool),
    "skip_special_tokens": Unserved(
        "the text of a reply has no control tokens; return_token_ids gives their ids", (True,), bool
    ),
    "return_tokens_as_token_ids": Unserved("return_token_ids gives the ids", (False,), bool),
    "return_prompt_token_ids": Unserved("return_token_ids gives those of the prompt too", (False,), bool),
    "return_prompt_text": Unserved("/v1/apply-template gives the text of the prompt", (False,), bool),
    "return_meta_info": Unserved("usage, timings and finish_details have the figures of a reply", (False,), bool),
    "return_hidden_states": Unserved("hidden states stay on the devices", (False,)),
    "return_routed_experts": Unserved("the choices of experts stay on the devices", (False,), bool),
    "prompt_logprobs": Unserved("/v1/completions gives them with echo and logprobs"),
    "logprob_token_ids": Unserved("log probabilities are those of the likeliest tokens"),
    "post_sampling_probs": Unserved("probabilities are those before the samplers", (False,), bool),
    "truncate_prompt_tokens": Unserved("a prompt is read whole; prefill_compression shortens it"),
    "documents": Unserved("put their text into the messages", ([],)),
    "chat_template": Unserved("the template is that of the model's file or of --chat-template", ("",)),
    "input_ids": Unserved("/v1/completions takes the ids of a prompt as prompt"),
    "prompt_embeds": Unserved("a prompt is text or token ids"),
    "image_data": Unserved("Luce reads text only", ([],)),
    "priority": Unserved("only 0 is supported: sessions take turns", (0,), int),
    "session_params": Unserved("a conversation is sent whole; session_id names its session"),
    "id_slot": Unserved("the server chooses the slot; the prefix cache is that of all slots", (-1,), int),
    "cache_salt": Unserved("the prefix cache has no salts; prefix_cache.scope off keeps a prompt out of it", ("",)),
    "kv_transfer_params": Unserved("keys and values come from this server alone", ({},)),
    "lora": Unserved(_LORA, ([],)),
    "lora_path": Unserved(_LORA, ("",)),
}

#: of OpenAI's bodies: what llama.cpp's /completion spells otherwise
NATIVE_ONLY: dict[str, Unserved] = {
    "n_predict": Unserved("of /completion; here the longest reply is max_tokens, in /v1/responses max_output_tokens"),
    "n_probs": Unserved("of /completion; here logprobs asks for log probabilities", (0,), int),
    "samplers": Unserved("of /completion; here a sampler is off at its neutral value", ([], "")),
}

CHAT: dict[str, Unserved] = NATIVE_ONLY | {
    "echo": Unserved("continue_final_message continues the last message", (False,), bool),
    "add_special_tokens": Unserved("the chat template writes the special tokens", (False,), bool),
    "parse_tool_calls": Unserved("tool_choice none leaves calls as text", (True,), bool),
    "web_search_options": Unserved("Luce searches nothing; offer a search as a tool"),
}

COMPLETION: dict[str, Unserved] = NATIVE_ONLY | {
    "add_special_tokens": Unserved(
        "a text has the BOS token that its file asks for; send ids without it", (True,), bool
    ),
    "max_completion_tokens": Unserved("here the longest reply is max_tokens"),
}

RESPONSES: dict[str, Unserved] = NATIVE_ONLY | {
    "max_tokens": Unserved("here the longest reply is max_output_tokens"),
    "max_completion_tokens": Unserved("here the longest reply is max_output_tokens"),
}

_NO_FORMAT = "here output_config.format holds a reply to a JSON schema; /v1/chat/completions takes other formats"
_OPENAI_ONLY = "not a field of /v1/messages; /v1/chat/completions has it"

MESSAGES: dict[str, Unserved] = NATIVE_ONLY | {
    "stop": Unserved("here stop_sequences end a reply", ([],)),
    "stop_token_ids": Unserved(_OPENAI_ONLY, ([],)),
    "ignore_eos": Unserved(_OPENAI_ONLY, (False,), bool),
    "logit_bias": Unserved(_OPENAI_ONLY, ({},)),
    "logprobs": Unserved(_OPENAI_ONLY, (False,)),
    "n": Unserved("a message is one reply", (1,), int),
    **dict.fromkeys(
        (
            "response_format",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "grammar",
            "json_schema",
            "regex",
            "ebnf",
        ),
        Unserved(_NO_FORMAT),
    ),
}


def with_unserved(base: type[msgspec.Struct], table: Mapping[str, Unserved]) -> type[msgspec.Struct]:
    """A body with the fields of `base` and those of the table. A subclass that declares one of them serves it."""
    fields = [(name, Annotated[row.kind | None, Meta(extra={"unserved": row})], None) for name, row in table.items()]
    return msgspec.defstruct(base.__name__, fields, bases=(base,), kw_only=True)


def refuse_unserved(request: msgspec.Struct) -> None:
    """Raises RequestError that names a field which asks for what Luce does not do."""
    for name, row in _rows(type(request)):
        value = getattr(request, name)
        if value is not None and value not in row.neutral:
            raise unsupported(name, row.why)


def served_fields(kind: type[msgspec.Struct]) -> set[str]:
    """The fields of a body that Luce serves."""
    return set(kind.__struct_fields__) - {name for name, _ in _rows(kind)}


@functools.cache
def _rows(kind: type[msgspec.Struct]) -> tuple[tuple[str, Unserved], ...]:
    """The fields of a body that are refused."""
    return tuple(
        (field.name, meta.extra["unserved"])
        for field in msgspec.structs.fields(kind)
        for meta in getattr(field.type, "__metadata__", ())
        if isinstance(meta, Meta) and meta.extra and "unserved" in meta.extra
    )
