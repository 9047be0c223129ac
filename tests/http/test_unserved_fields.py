"""Fields of vLLM's, SGLang's and llama.cpp's bodies that Luce does not serve are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http_server import running

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "hi", "max_tokens": 20},
    "/completion": {"prompt": "hi", "n_predict": 20},
    "/v1/responses": {"input": "hi", "max_output_tokens": 20},
    "/v1/messages": HI,
}
CHAT, COMPLETIONS, NATIVE, RESPONSES, MESSAGES = BODIES

#: a value that asks for something, and one that asks for nothing (None: only null does)
OF_ALL: dict[str, tuple[Any, Any]] = {
    "typical_p": (0.5, 1),
    "top_n_sigma": (1, -1),
    "xtc_probability": (0.5, 0),
    "dry_multiplier": (0.8, 0),
    "top_a": (0.5, 0),
    "tfs_z": (0.5, 1),
    "adaptive_target": (0.5, -1),
    "mirostat": (2, 0),
    "dynatemp_range": (0.5, 0),
    "min_keep": (3, 0),
    "use_beam_search": (True, False),
    "logits_processors": (["a"], []),
    "custom_logit_processor": ("a", ""),
    "bad_words": (["a"], []),
    "allowed_token_ids": ([1], None),
    "structural_tag": ({}, None),
    "grammar_lazy": (True, False),
    "repetition_detection": ({"max_pattern_size": 3}, None),
    "stop_regex": ("", None),
    "include_stop_str_in_output": (True, False),
    "no_stop_trim": (True, False),
    "skip_special_tokens": (False, True),
    "return_tokens_as_token_ids": (True, False),
    "return_prompt_token_ids": (True, False),
    "return_prompt_text": (True, False),
    "return_meta_info": (True, False),
    "return_hidden_states": ("last", False),
    "return_routed_experts": (True, False),
    "prompt_logprobs": (0, None),
    "logprob_token_ids": ([1], None),
    "post_sampling_probs": (True, False),
    "truncate_prompt_tokens": (-1, None),
    "documents": ([{"title": "a", "text": "b"}], []),
    "chat_template": ("{{ messages }}", ""),
    "input_ids": ([1, 2], None),
    "prompt_embeds": ("AAAA", None),
    "image_data": ([{"data": "AAAA", "id": 1}], []),
    "priority": (-1, 0),
    "session_params": ({"id": "a"}, None),
    "id_slot": (0, -1),
    "cache_salt": ("a", ""),
    "kv_transfer_params": ({"do_remote_decode": True}, {}),
    "lora": ([{"id": 0, "scale": 1}], []),
    "lora_path": ("a", ""),
}
OF_SOME: dict[str, dict[str, tuple[Any, Any]]] = {
    CHAT: {
        "n_predict": (5, None),
        "n_probs": (5, 0),
        "samplers": (["top_k"], []),
        "echo": (True, False),
        "add_special_tokens": (True, False),
        "parse_tool_calls": (False, True),
        "web_search_options": ({}, None),
        "best_of": (2, 1),
    },
    COMPLETIONS: {
        "n_predict": (5, None),
        "add_special_tokens": (False, True),
        "max_completion_tokens": (5, None),
        "best_of": (2, 1),
    },
    NATIVE: {},
    RESPONSES: {
        "n_predict": (5, None),
        "max_tokens": (5, None),
        "max_completion_tokens": (5, None),
    },
    MESSAGES: {
        "stop": (["a"], []),
        "stop_token_ids": ([1], []),
        "ignore_eos": (True, False),
        "logit_bias": ({"1": 5}, {}),
        "logprobs": (True, False),
        "n": (2, 1),
        "response_format": ({"type": "json_object"}, None),
        "structured_outputs": ({"json": {}}, None),
        "guided_json": ({}, None),
        "guided_regex": ("a", None),
        "guided_choice": (["a"], None),
        "guided_grammar": ("start: /a/", None),
        "grammar": ("start: /a/", None),
        "json_schema": ({}, None),
        "regex": ("a", None),
        "ebnf": ('root ::= "a"', None),
        "n_predict": (5, None),
    },
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_that_asks_for_what_luce_does_not_do_is_refused_by_name(path: str) -> None:
    async with running() as here:
        for name, (asks, _) in (OF_ALL | OF_SOME[path]).items():
            status, reply, _ = await here.post(path, {**BODIES[path], name: asks})
            assert status == 400 and reply["error"]["message"].startswith(f"{name}: "), (name, reply)
            if path != MESSAGES:
                assert (reply["error"]["param"], reply["error"]["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_ask_for_nothing_are_accepted(path: str) -> None:
    neutral = {name: nothing for name, (_, nothing) in (OF_ALL | OF_SOME[path]).items()}
    async with running() as here:
        status, reply, _ = await here.post(path, {**BODIES[path], **neutral})
        assert status == 200, reply
        assert await here.metric("luce_unknown_request_fields_total") == 0
