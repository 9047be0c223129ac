"""luce/text/tool_history.py: what templates get, and that text written for them is read back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from luce.models.tool_formats import HERMES, TOOL_FORMATS, choose_calls
from luce.text.tool_history import call_text, for_template
from tests.support.call_parts import Found, read
from tests.support.tool_templates import TEMPLATES, format_named, rendered

ARGUMENTS: dict[str, Any] = {"text": 'a "b"\n', "n": 5, "o": {"k": [True, {}]}}
TOOLS: dict[str, Any] = {
    "f": {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}}
}


def calling(*calls: tuple[str, Any], content: str = "", name: str = "f") -> dict[str, Any]:
    made = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} for id, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


@pytest.mark.parametrize("name", [calls.format for calls in TOOL_FORMATS])
def test_a_written_call_is_read_back(name: str) -> None:
    calls = format_named(name)
    text = calls.section[0] + call_text(calls, "f", ARGUMENTS) + calls.section[1]
    assert read(name, text, TOOLS) == Found("", [("f", ARGUMENTS)])


def test_calls_of_lfm2_go_into_the_text_that_its_template_prints() -> None:
    template = (
        "{% if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    calls = choose_calls(template, HERMES).calls
    history = [calling(("1", '{"n": 5, "a-b": null}'), ("2", "{}"), content="Let me see."), result("1", "6")]
    found, tools = for_template(history, [{"name": "f"}], calls, template)
    text = 'Let me see.<|tool_call_start|>[f(n=5, **{"a-b": None}), f()]<|tool_call_end|>'
    assert found == [{"role": "assistant", "content": text}, result("1", "6")] and tools == [{"name": "f"}]


def test_arguments_become_objects_and_keep_their_order() -> None:
    history = [calling(("1", '{"b": 1, "a": 2}'), ("2", ""), ("3", "no json"), ("4", "[1]"), ("5", None))]
    found, _ = for_template(history, None, format_named("hermes"), TEMPLATES["hermes"])
    arguments = [call["function"]["arguments"] for call in found[0]["tool_calls"]]
    assert arguments == [{"b": 1, "a": 2}, {}, {"_raw": "no json"}, {"_raw": "[1]"}, {}]
    assert json.dumps(arguments[0]) == '{"b": 1, "a": 2}'


def test_results_stand_in_the_order_of_the_calls() -> None:
    history = [
        calling(("a", {}), ("b", {})),
        result("b", "2"),
        result("x", "?"),
        result("a", "1"),
        {"role": "user", "content": ""},
    ]
    found, _ = for_template(history, None, format_named("hermes"), TEMPLATES["hermes"])
    assert [message.get("tool_call_id") for message in found] == [None, "a", "b", "x", None]


def test_older_functions_are_calls_and_results() -> None:
    history = [
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": '{"n": 1}'}},
        {"role": "function", "name": "f", "content": "one"},
    ]
    text = rendered("hermes", for_template(history, None, format_named("hermes"), TEMPLATES["hermes"])[0])
    assert '{"name": "f", "arguments": {"n": 1}}' in text and "<tool_response>\none\n</tool_response>" in text


def test_ids_that_a_template_does_not_take_are_mapped_alike_for_call_and_result() -> None:
    history = [calling(("call_0123456789", {}), ("abcdefghi", {})), result("call_0123456789", "1")]
    found, _ = for_template(history, None, format_named("mistral_v7"), TEMPLATES["mistral_v7"])
    first, second = (call["id"] for call in found[0]["tool_calls"])
    assert len(first) == 9 and first.isalnum() and second == "abcdefghi" and found[1]["tool_call_id"] == first
    assert "[TOOL_CALLS]" in rendered("mistral_v7", found)


def test_a_template_with_one_call_at_a_time_gets_one_message_each() -> None:
    history = [calling(("a", {"n": 1}), ("b", {"n": 2}), content="So."), result("a", "one"), result("b", "two")]
    found, _ = for_template(history, None, format_named("llama3"), TEMPLATES["llama3"])
    assert [(m["role"], len(m.get("tool_calls", ()))) for m in found] == [("assistant", 1), ("tool", 0)] * 2
    text = rendered("llama3", found)
    assert text.index('"n": 1') < text.index("one") < text.index('"n": 2') < text.index("two")


def test_gemma_gets_results_on_the_message_of_the_calls_and_goes_on_in_it() -> None:
    calls, template = format_named("gemma4"), TEMPLATES["gemma4"]
    history = [
        {"role": "user", "content": "hi"},
        calling(("a", {"n": 1}), ("b", {})),
        result("b", '{"r": 2}'),
        result("a", "one"),
    ]
    found, _ = for_template(history, [], calls, template)
    text = rendered("gemma4", found, add_generation_prompt=True)
    assert text.endswith(
        "<|turn>model\n<|tool_call>call:f{n:1}<tool_call|><|tool_call>call:f{}<tool_call|>"
        '<|tool_response>response:f{value:<|"|>one<|"|>}<tool_response|>'
        "<|tool_response>response:f{r:2}<tool_response|>"
    )
    # The next turn's prompt begins with this one's, and with the answer behind it.
    answered, _ = for_template([*history, {"role": "assistant", "content": "Done."}], [], calls, template)
    assert rendered("gemma4", answered).startswith(text + "Done.<turn|>")


def test_a_template_that_shows_no_tools_gets_text() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tool = {"type": "function", "function": {"name": "f"}}
    history = [{"role": "system", "content": "Be brief."}, calling(("a", {"n": 1}), content="Hm."), result("a", "one")]
    found, shown = for_template(history, [tool], format_named("hermes"), source)
    assert shown is None and [m["role"] for m in found] == ["system", "assistant", "user"]
    assert found[0]["content"].startswith("Be brief.\n\n# Tools") and json.dumps(tool) in found[0]["content"]
    assert found[1]["content"] == 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    assert found[2] == {"role": "user", "content": "<tool_response>\none\n</tool_response>"}
    assert for_template(history[:1], None, format_named("hermes"), source)[0] == history[:1]


def test_conversations_without_tools_stay_as_they_are() -> None:
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for name, template in TEMPLATES.items():
        assert for_template(history, None, format_named(name), template) == (history, None)


def test_harmony_gets_reasoning_as_thinking_and_one_call_of_a_message() -> None:
    """The rendered conversation is written by hand from openai/harmony's docs/format.md."""
    calls, template = format_named("harmony"), TEMPLATES["harmony"]
    history = [
        {"role": "user", "content": "hi"},
        {**calling(("a", {"n": 1}), ("b", {})), "reasoning_content": "Two."},
        result("b", "2"),
        result("a", "1"),
        {**calling(("c", {}), content="I go on."), "reasoning_content": "More."},
        result("c", "3"),
        {"role": "assistant", "content": "Done.", "reasoning_content": "End."},
    ]
    found, _ = for_template(history, [], calls, template)
    text = rendered("harmony", found)
    assert text[text.index("<|end|>") + len("<|end|>") :] == (
        "<|start|>user<|message|>hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"1"<|end|>'
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"2"<|end|>'
        # The template has one text in front of a call.
        "<|start|>assistant<|channel|>analysis<|message|>More.\n\nI go on.<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"3"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Done.<|end|>"
    )


def test_cohere2_gets_a_plan_in_front_of_calls_and_counts_calls_in_the_whole_conversation() -> None:
    """The rendered conversation is written by hand from the example in the system turn of Command R7B's template."""
    calls, template = format_named("cohere2"), TEMPLATES["cohere2"]
    history = [
        {"role": "user", "content": "hi"},
        {**calling(("a", {"n": 1}), ("b", {})), "reasoning_content": "Two."},
        result("b", "2"),
        result("a", "1"),
        {**calling(("c", {}), content="I go on."), "reasoning_content": "More."},
        result("c", "3"),
        {**calling(("d", {}), content="\n\n"), "reasoning_content": "Last."},
        {**calling(("e", {}), content="Beside."), "tool_plan": "Mine."},
        {"role": "assistant", "content": "Done.", "reasoning_content": "End."},
    ]
    found, _ = for_template(history, [], calls, template)

    def shown(number: int, content: str) -> str:
        return (
            "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\n    {\n"
            f'        "tool_call_id": "{number}",\n        "results": {{\n            "0": "{content}"\n        }},\n'
            '        "is_error": null\n    }\n]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>'
        )

    def called(plan: str, *objects: str) -> str:
        plan = f"<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>{plan}<|END_THINKING|>"
        inner = ",\n".join(f"    {text}" for text in objects)
        return f"{plan}<|START_ACTION|>[\n{inner}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>"

    assert rendered("cohere2", found).partition("<|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|>")[2] == "".join(
        (
            called(
                "Two.",
                '{"tool_call_id": "0", "tool_name": "f", "parameters": {"n": 1}}',
                '{"tool_call_id": "1", "tool_name": "f", "parameters": {}}',
            ),
            shown(0, "1"),
            shown(1, "2"),
            # The template has one text in front of a call.
            called("More.\n\nI go on.", '{"tool_call_id": "2", "tool_name": "f", "parameters": {}}'),
            shown(2, "3"),
            called("Last.", '{"tool_call_id": "3", "tool_name": "f", "parameters": {}}'),
            called("Mine.", '{"tool_call_id": "4", "tool_name": "f", "parameters": {}}'),
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>Done.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        )
    )


def test_calls_that_luce_writes_for_a_template_are_counted_too() -> None:
    history = [calling(("a", {}), ("b", {"n": 1})), result("a", "1"), calling(("c", {}))]
    found, _ = for_template(history, None, format_named("cohere2"), "{{ m.content }}")
    texts = "".join(one["content"] for one in found)
    numbers = re.findall(r'{"tool_call_id": "(\d)", "tool_name": "f", "parameters": {', texts)
    assert numbers == ["0", "1", "2"] and texts.count("<|START_ACTION|>[\n    {") == 2


def test_reasoning_keeps_its_name_where_the_template_does_not_read_thinking_alone() -> None:
    history = [{"role": "assistant", "content": "", "reasoning_content": "So."}]
    for source in ("{{ m.reasoning_content or m.thinking }}", "{% if thinking %}{{ m.content }}{% endif %}"):
        assert for_template(history, None, format_named("hermes"), source)[0] == history
    found, _ = for_template(history, None, format_named("hermes"), "{{ message['thinking'] }}")
    assert found == [{"role": "assistant", "content": "", "thinking": "So."}]
