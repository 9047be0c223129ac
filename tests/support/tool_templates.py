"""Chat templates with tools, one for each dialect of tool calls, and vocabularies for them.

Written for these tests. Where it matters for Luce they do as the templates that the models' publishers ship: what they
print around calls, arguments and results, what they sort, and what they refuse.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from luce.models.calls import Calls
from luce.models.tool_formats import TOOL_FORMATS
from luce.text.marks import Marks
from luce.text.template import ChatTemplate
from luce.text.tokenizer import Tokenizer
from tests.support.vocabulary import byte_level

# ChatML with tools in the system turn and results in user turns, as of Qwen.
_CHATML = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
    "EXAMPLE{% if messages[0].role == 'system' %}\n\n{{ messages[0].content }}{% endif %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% if not tools or not loop.first %}"
    "<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _chatml(example: str, calls: str) -> str:
    return _CHATML.replace("EXAMPLE", example).replace("CALLS", calls)


_ARGUMENT = "{{ v if v is string else v | tojson }}"
_JSON_CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_EACH = "{% for c in m.tool_calls or [] %}"
_ITEMS = "{% for k, v in c.function.arguments.items() %}"

_GEMMA4 = (
    "{% macro written(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}"
    "{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, i in v | dictsort %}{{ ',' if not loop.first else '' }}{{ k }}:"
    "{{ written(i) }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for i in v %}{{ ',' if not loop.first else '' }}{{ written(i) }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
    "{% set ns = namespace(open=false) %}"
    "{% if tools or messages[0].role == 'system' %}<|turn>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}"
    "{% for t in tools or [] %}<|tool>declaration:{{ t.function.name }}{}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if not (ns.open and m.tool_calls) %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{% set ns.open = false %}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ ',' if not loop.first else '' }}{{ k }}:{{ written(v) }}"
    "{% endfor %}{{ '}<tool_call|>' }}{% endfor %}"
    "{% for r in m.tool_responses or [] %}{% set ns.open = true %}"
    "{{ '<|tool_response>response:' + r.name + '{' }}"
    "{% if r.response is mapping %}{% for k, v in r.response | dictsort %}{{ ',' if not loop.first else '' }}{{ k }}:"
    "{{ written(v) }}{% endfor %}{% else %}value:{{ written(r.response) }}{% endif %}{{ '}<tool_response|>' }}"
    "{% endfor %}{{ m.content | trim }}"
    "{% if not (m.tool_responses and not m.content) %}{% set ns.open = false %}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}"
)

_LLAMA3 = (
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    '{"name": function name, "parameters": arguments}\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|eot_id|>'
    "{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% set c = m.tool_calls[0] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role in ['tool', 'ipython'] %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# As the publisher's: it writes no content beside calls, counts them in the whole conversation, and finds the number of
# a result by the id of its call. What the system turn says is left out.
_COHERE2 = (
    "{% set ns = namespace(number=0) %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># System Preamble\n"
    "{% if tools %}## Available Tools\n```json\n[\n{% for t in tools %}"
    '    {"name": "{{ t.function.name }}", "parameters": {{ t.function.parameters | tojson }}, "responses": null}'
    "{{ ',\n' if not loop.last else '\n' }}{% endfor %}]\n```\n{% endif %}"
    "{% if messages[0].role == 'system' %}# Developer Preamble\n{{ messages[0].content }}{% endif %}"
    "<|END_OF_TURN_TOKEN|>"
    "{% for m in messages if m.role != 'system' %}<|START_OF_TURN_TOKEN|>"
    "{% if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}"
    '{% elif m.role == \'tool\' %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\n    {\n        "tool_call_id": "'
    "{% set seen = namespace(number=0, found=false) %}{% for past in messages %}{% for c in past.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id and not seen.found %}{{ seen.number }}{% set seen.found = true %}{% endif %}"
    "{% set seen.number = seen.number + 1 %}"
    "{% endfor %}{% endfor %}"
    '",\n        "results": {\n            "0": {{ m.content | tojson }}\n        },\n'
    '        "is_error": null\n    }\n]<|END_TOOL_RESULT|>'
    "{% elif m.tool_calls %}<|CHATBOT_TOKEN|><|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|><|START_ACTION|>["
    '{% for c in m.tool_calls %}{{ \'\n\' }}    {"tool_call_id": "{{ ns.number }}", '
    '"tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{{ ',' if not loop.last else '\n' }}{% set ns.number = ns.number + 1 %}{% endfor %}]<|END_ACTION|>"
    "{% else %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)

# As the publisher's: one call of a message, its text or its reasoning as analysis, a result as a JSON string.
_HARMONY = (
    "{% set ns = namespace(name='') %}<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}\n"
    "{% if tools %}Calls to these tools must go to the commentary channel: 'functions'.{% endif %}<|end|>"
    "{% if tools or messages[0].role == 'system' %}<|start|>developer<|message|>"
    "{% if messages[0].role == 'system' %}# Instructions\n\n{{ messages[0].content }}\n\n{% endif %}"
    "{% if tools %}# Tools\n\nnamespace functions {\n{% for t in tools %}type {{ t.function.name }} = (_: "
    "{{ t.function.parameters | tojson }}) => any;\n{% endfor %}}{% endif %}<|end|>{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif 'tool_calls' in m %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "{% if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}"
    "<|end|>{% endif %}"
    "{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}"
    "<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_DSML = (
    "{% if m.tool_calls %}\n\n<｜DSML｜SECTION>\n{% for c in m.tool_calls %}"
    '<｜DSML｜invoke name="{{ c.function.name }}">\n' + _ITEMS + '<｜DSML｜parameter name="{{ k }}" '
    'string="{{ "true" if v is string else "false" }}">'
    + _ARGUMENT
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜SECTION>{% endif %}"
)
_V3_CALLS = "{% if m.tool_calls %}<｜tool▁calls▁begin｜>" + _EACH
_V3_END = "{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
_BEFORE = "{% if (loop.first and m.content) or not loop.first %}\n{% endif %}"

# LFM2's own prints no calls: Luce writes past ones into the text.
_LFM2 = (
    "{% macro python(v) %}{% if v is none %}None{% elif v is boolean %}{{ 'True' if v else 'False' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, i in v.items() %}{{ ', ' if not loop.first else '' }}{{ k | tojson }}: "
    "{{ python(i) }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable and v is not string %}[{% for i in v %}{{ ', ' if not loop.first else '' }}{{ python(i) }}"
    "{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
) + _chatml(
    "<|tool_list_start|>[]<|tool_list_end|>",
    "{% if m.tool_calls %}<|tool_call_start|>["
    + _EACH
    + "{{ ', ' if not loop.first else '' }}{{ c.function.name }}("
    + _ITEMS
    + "{{ ', ' if not loop.first else '' }}{% if k.isascii() and k.isidentifier() %}{{ k }}={{ python(v) }}"
    "{% else %}**{{ '{' }}{{ k | tojson }}: {{ python(v) }}{{ '}' }}{% endif %}{% endfor %}){% endfor %}"
    "]<|tool_call_end|>"
    "{% endif %}",
)

#: chat templates by the dialect that they print
TEMPLATES: Mapping[str, str] = {
    "qwen_xml": _chatml(
        "<tool_call>\n<function=example>\n<parameter=p>\n",
        _EACH + "{% if loop.first and m.content %}\n\n{% elif not loop.first %}\n{% endif %}"
        "<tool_call>\n<function={{ c.function.name }}>\n" + _ITEMS + "<parameter={{ k }}>\n"
        # Qwen3.5 prints booleans and null as Python does.
        "{{ v | tojson if v is mapping or (v is iterable and v is not string) else v | string }}"
        "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    ),
    "hermes": _chatml(
        '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>',
        _EACH + _BEFORE + "<tool_call>\n" + _JSON_CALL + "\n</tool_call>{% endfor %}",
    ),
    "gemma4": _GEMMA4,
    "lfm2": _LFM2,
    "harmony": _HARMONY,
    "cohere2": _COHERE2,
    "glm45": _chatml(
        "<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n</tool_call>",
        _EACH
        + "\n<tool_call>{{ c.function.name }}\n"
        + _ITEMS
        + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
        + _ARGUMENT
        + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    ),
    "glm47": _chatml(
        "<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value></tool_call>",
        _EACH
        + "<tool_call>{{ c.function.name }}"
        + _ITEMS
        + "<arg_key>{{ k }}</arg_key><arg_value>"
        + _ARGUMENT
        + "</arg_value>{% endfor %}</tool_call>{% endfor %}",
    ),
    "llama3": _LLAMA3,
    "smollm2": _chatml(
        '<tool_call>[\n{"name": "f", "arguments": {}}\n]</tool_call>',
        "{% if m.tool_calls %}{% if m.content %}\n{% endif %}<tool_call>[\n"
        + _EACH
        + _JSON_CALL
        + "{{ ',\n' if not loop.last else '' }}{% endfor %}\n]</tool_call>{% endif %}",
    ),
    "mistral_v7": _chatml(
        "[AVAILABLE_TOOLS]",
        "{% if m.tool_calls %}[TOOL_CALLS] [" + _EACH + "{% if c.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        + _JSON_CALL[:-1]
        + ', "id": "{{ c.id }}"}'
        + "{{ ', ' if not loop.last else '' }}{% endfor %}]{% endif %}",
    ),
    "mistral_v11": _chatml(
        "[AVAILABLE_TOOLS]",
        _EACH + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
    ),
    "minimax_m2": _chatml(
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">v</parameter>\n</invoke>\n</minimax:tool_call>',
        "{% if m.tool_calls %}\n<minimax:tool_call>\n"
        + _EACH
        + '<invoke name="{{ c.function.name }}">\n'
        + _ITEMS
        + '<parameter name="{{ k }}">'
        + _ARGUMENT
        + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}",
    ),
    "seed_oss": _chatml(
        "<seed:tool_call>\n<function=f>\n<parameter=k>v</parameter>\n</function>\n</seed:tool_call>",
        "{% if m.content and m.tool_calls %}\n{% endif %}"
        + _EACH
        + "\n<seed:tool_call>\n<function={{ c.function.name }}>\n"
        + _ITEMS
        # As Python prints them, objects and lists too.
        + "<parameter={{ k }}>{{ v | string }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}",
    ),
    "deepseek_v3": _chatml(
        "",
        _V3_CALLS + "{{ '\n' if not loop.first else '' }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>" + _V3_END,
    ),
    "deepseek_v31": _chatml(
        "",
        _V3_CALLS + "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>" + _V3_END,
    ),
    "deepseek_v32": _chatml("", _DSML.replace("SECTION", "function_calls")),
    "deepseek_v4": _chatml("", _DSML.replace("SECTION", "tool_calls")),
}

_MESSAGES = ("<|im_start|>", "<|im_end|>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_ARGUMENT_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_V3_TOKENS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
#: the special tokens of each dialect's vocabularies, as the published ones have them
SPECIALS: Mapping[str, Sequence[str]] = {
    "qwen_xml": (*_MESSAGES, *_TOOL_CALL),
    "harmony": ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
    "hermes": (*_MESSAGES, *_TOOL_CALL),
    "gemma4": ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<tool_response|>"),
    "lfm2": (*_MESSAGES, "<|tool_call_start|>", "<|tool_call_end|>"),
    "glm45": (*_MESSAGES, *_TOOL_CALL, *_ARGUMENT_TAGS),
    "glm47": (*_MESSAGES, *_TOOL_CALL, *_ARGUMENT_TAGS),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    "smollm2": _MESSAGES,
    "mistral_v7": (*_MESSAGES, "[TOOL_CALLS]"),
    "mistral_v11": (*_MESSAGES, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "minimax_m2": (*_MESSAGES, "<minimax:tool_call>", "</minimax:tool_call>"),
    "cohere2": (
        *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "seed_oss": (*_MESSAGES, "<seed:tool_call>", "</seed:tool_call>"),
    "deepseek_v3": (*_MESSAGES, *_V3_TOKENS),
    "deepseek_v31": (*_MESSAGES, *_V3_TOKENS),
    "deepseek_v32": (*_MESSAGES, "｜DSML｜"),
    "deepseek_v4": (*_MESSAGES, "｜DSML｜"),
}


def format_named(name: str) -> Calls:
    """A dialect by its name."""
    return next(calls for calls in TOOL_FORMATS if calls.format == name)


@functools.cache
def byte_tokenizer(name: str, *, special: bool = True) -> Tokenizer:
    """A tokenizer of single bytes with the special tokens of a dialect; `special` False: with those of messages only,
    so that markers of calls are text."""
    ends = SPECIALS[name][:2] if name != "llama3" else SPECIALS[name][:4]
    others = tuple(text for text in SPECIALS[name] if text not in ends) if special else ()
    # Gemma's and DeepSeek's are control tokens in some files, so both kinds are here.
    control = others if name.startswith(("gemma", "deepseek", "mistral", "llama", "harmony")) else ()
    visible = () if control else others
    keys = byte_level(control=(*ends, *control), visible=visible, eos_token_id=257)
    if name == "harmony" and special:
        # The end of a message is not that of a reply.
        keys["tokenizer.ggml.eos_token_id"] = 255 + len(SPECIALS[name])
        return Tokenizer(keys, eos_texts=("<|call|>", "<|return|>"))
    return Tokenizer(keys)


@functools.cache
def marks(name: str, *, special: bool = True) -> Marks:
    """The marks of a dialect in the vocabulary of `byte_tokenizer`."""
    return Marks(format_named(name), byte_tokenizer(name, special=special))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def rendered(name: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """A conversation as a template of this module prints it."""
    return _template(name).render(messages=messages, **variables)


class DialectTemplate(ChatTemplate):
    """A template of this module, which this process renders."""

    def __init__(self, name: str) -> None:
        self.source = TEMPLATES[name]
        self._name = name

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        return rendered(self._name, messages, **variables)


@functools.cache
def _template(name: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(TEMPLATES[name])


def _tojson(value: Any) -> str:

    return json.dumps(value, ensure_ascii=False)
