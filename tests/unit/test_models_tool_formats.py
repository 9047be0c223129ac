"""luce/models/tool_formats.py: which dialect of tool calls a model has, and that each record is consistent."""

from __future__ import annotations

import pytest

from luce.models.calls import Json
from luce.models.tool_formats import GLM45, HERMES, QWEN_XML, TOOL_FORMATS, choose_calls

# What tells the templates apart, as their publishers write it.
TEMPLATES = {
    "qwen_xml": "{% if tools %}<tool_call>\n<function=example>\n<parameter=p>\n{% endif %}",
    "hermes": '{% if tools %}<tool_call>\n{"name": <function-name>, "arguments": {}}\n</tool_call>{% endif %}',
    "harmony": "{% if tools %}{{ 'functions.' + c.name + '<|channel|>commentary ' }}{% endif %}",
    "gemma4": "{% if tools %}{{ '<|tool_call>call:' + f.name }}{% endif %}",
    "glm45": "{% if tools %}<tool_call>n\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>{% endif %}",
    "glm47": "{% if tools %}<tool_call>{n}<arg_key>{k}</arg_key><arg_value>{v}</arg_value></tool_call>{% endif %}",
    "llama3": """{% if tools %}{{ '"parameters": ' }}{{ "<|start_header_id|>ipython" }}{% endif %}""",
    "smollm2": '{% if tools %}<tool_call>[\n{"name": "f", "arguments": {}}\n]</tool_call>{% endif %}',
    "mistral_v7": "{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}",
    "mistral_v11": "{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}",
    "minimax_m2": "{% if tools %}<minimax:tool_call>\n{{ '<invoke name=\"' + n + '\">' }}{% endif %}",
    "seed_oss": "{% if tools %}<seed:tool_call>\n<function=f>\n<parameter=k>v</parameter>\n{% endif %}",
    "cohere2": """{% if tools %}<|START_ACTION|>[\n{"tool_call_id": "{{ i }}", "tool_name": "{{ n }}"{% endif %}""",
    "lfm2": "{% if tools %}List of tools: <|tool_list_start|>[{{ tools | tojson }}]<|tool_list_end|>{% endif %}",
    "deepseek_v3": "{% if tools %}{{ 'function<｜tool▁sep｜>' + n + '\n```json\n' }}{% endif %}",
    "deepseek_v31": "{% if tools %}{{ n + '<｜tool▁sep｜>' + a }}{% endif %}",
    "deepseek_v32": '{% if tools %}<｜DSML｜function_calls><｜DSML｜invoke name="n">{% endif %}',
    "deepseek_v4": '{% if tools %}<｜DSML｜tool_calls><｜DSML｜invoke name="n">{% endif %}',
}


def test_every_dialect_is_recognised_by_its_template() -> None:
    assert set(TEMPLATES) == {calls.format for calls in TOOL_FORMATS}
    for name, template in TEMPLATES.items():
        chosen = choose_calls(template, HERMES)
        assert (chosen.calls.format, chosen.why) == (name, "the chat template")


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_a_template_that_shows_no_tools_means_hermes(template: str | None) -> None:
    chosen = choose_calls(template, QWEN_XML)
    assert chosen.calls is HERMES and chosen.why == "the chat template shows no tools"


def test_the_family_decides_for_other_templates() -> None:
    assert choose_calls("{{ tools | tojson }}", GLM45) == (GLM45, "the family")


def test_a_name_wins_over_the_template() -> None:
    assert choose_calls(TEMPLATES["gemma4"], HERMES, "qwen_xml") == (QWEN_XML, "--tool-format")
    with pytest.raises(ValueError, match=r"expected auto, .*hermes"):
        choose_calls(TEMPLATES["gemma4"], HERMES, "qwen")


def test_a_trigger_begins_the_first_call() -> None:
    for format in TOOL_FORMATS:
        for calls in (format, *format.accepts):
            begins = calls.section[0] + calls.call[0]
            if isinstance(calls.arguments, Json) and calls.arguments.fields:
                begins += f'{{"{calls.arguments.fields[0]}"'
            assert begins.startswith(calls.trigger)
