"""The dialects of tool calls that Luce knows, one record each, and the choice among them.

Sources: the chat templates of the models' publishers, which print past calls as the models write them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from luce.models.calls import Bare, Calls, Json, Keywords, Tagged

QWEN_XML = Calls(
    format="qwen_xml",
    trigger="<tool_call>",
    lead="\n\n",
    call=("<tool_call>\n", "</function>\n</tool_call>"),
    between="\n",
    name=("<function=", ">\n"),
    arguments=Tagged(key=("<parameter=", ">\n"), value=("", "\n</parameter>\n")),
    template=("<function=", "<parameter="),
)

HERMES = Calls(
    format="hermes",
    trigger="<tool_call>",
    lead="\n",
    call=("<tool_call>\n", "\n</tool_call>"),
    between="\n",
    arguments=Json(fields=("name", "arguments")),
    template=("<tool_call>", "</tool_call>"),
)

GEMMA4 = Calls(
    format="gemma4",
    trigger="<|tool_call>",
    call=("<|tool_call>", "<tool_call|>"),
    name=("call:", ""),
    arguments=Bare(quote='<|"|>'),
    ends=("<|tool_response>",),
    inside=('<|"|>',),
    results="responses",
    template=("<|tool_call>",),
)

GLM47 = Calls(
    format="glm47",
    trigger="<tool_call>",
    call=("<tool_call>", "</tool_call>"),
    arguments=Tagged(key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>")),
    template=("</arg_key><arg_value>",),
)

GLM45 = Calls(
    format="glm45",
    trigger="<tool_call>",
    lead="\n",
    call=("<tool_call>", "</tool_call>"),
    between="\n",
    name=("", "\n"),
    arguments=Tagged(key=("<arg_key>", "</arg_key>\n"), value=("<arg_value>", "</arg_value>\n")),
    template=("<arg_key>", "<arg_value>"),
)

LLAMA3 = Calls(
    format="llama3",
    trigger='{"name"',
    between="; ",
    arguments=Json(fields=("name", "parameters")),
    parallel=False,
    at_start=True,
    ends=("<|eom_id|>", "<|eot_id|>"),
    accepts=(
        Calls(
            format="llama3",
            trigger="<|python_tag|>",
            call=("<|python_tag|>", ""),
            between="; ",
            arguments=Json(fields=("name", "parameters")),
        ),
    ),
    template=('"parameters"', "ipython"),
)

SMOLLM2 = Calls(
    format="smollm2",
    trigger="<tool_call>",
    lead="\n",
    section=("<tool_call>[\n", "\n]</tool_call>"),
    between=",\n",
    arguments=Json(fields=("name", "arguments")),
    accepts=(HERMES,),
    template=("<tool_call>[",),
)

MISTRAL_V7 = Calls(
    format="mistral_v7",
    trigger="[TOOL_CALLS]",
    section=("[TOOL_CALLS] [", "]"),
    between=", ",
    arguments=Json(fields=("name", "arguments"), id="id"),
    id_length=9,
    template=("[TOOL_CALLS]",),
)

MISTRAL_V11 = Calls(
    format="mistral_v11",
    trigger="[TOOL_CALLS]",
    call=("[TOOL_CALLS]", ""),
    name=("", "[ARGS]"),
    arguments=Json(),
    inside=("[ARGS]", "[CALL_ID]"),
    id_length=9,
    accepts=(
        Calls(
            format="mistral_v11",
            trigger="[TOOL_CALLS]",
            call=("[TOOL_CALLS]", ""),
            id=("[CALL_ID]", "[ARGS]"),
            arguments=Json(),
        ),
    ),
    template=("[TOOL_CALLS]", "[ARGS]"),
)

DEEPSEEK_V31 = Calls(
    format="deepseek_v31",
    trigger="<｜tool▁calls▁begin｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    name=("", "<｜tool▁sep｜>"),
    arguments=Json(),
    inside=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    template=("<｜tool▁sep｜>",),
)

DEEPSEEK_V3 = Calls(
    format="deepseek_v3",
    trigger="<｜tool▁calls▁begin｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call=("<｜tool▁call▁begin｜>", "\n```<｜tool▁call▁end｜>"),
    between="\n",
    name=("function<｜tool▁sep｜>", "\n```json\n"),
    arguments=Json(),
    inside=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    template=("<｜tool▁sep｜>", "```json"),
)

DEEPSEEK_V32 = Calls(
    format="deepseek_v32",
    trigger="<｜DSML｜function_calls>",
    lead="\n\n",
    section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    call=("<｜DSML｜invoke ", "</｜DSML｜invoke>\n"),
    name=('name="', '">\n'),
    arguments=Tagged(
        key=('<｜DSML｜parameter name="', '"'), typed=' string="%s"', value=(">", "</｜DSML｜parameter>\n")
    ),
    template=("｜DSML｜", "function_calls"),
)

DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    format="deepseek_v4",
    trigger="<｜DSML｜tool_calls>",
    section=("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
    template=("｜DSML｜",),
)


MINIMAX_M2 = Calls(
    format="minimax_m2",
    trigger="<minimax:tool_call>",
    lead="\n",
    section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    call=("<invoke ", "</invoke>\n"),
    name=('name="', '">\n'),
    arguments=Tagged(key=('<parameter name="', '">'), value=("", "</parameter>\n")),
    template=("<minimax:tool_call>", "<invoke name="),
)

SEED_OSS = Calls(
    format="seed_oss",
    trigger="<seed:tool_call>",
    lead="\n\n",
    call=("<seed:tool_call>\n", "</function>\n</seed:tool_call>"),
    between="\n",
    name=("<function=", ">\n"),
    arguments=Tagged(key=("<parameter=", ">"), value=("", "</parameter>\n")),
    template=("<seed:tool_call>", "<function="),
)

# A model that goes on counting writes the number that the template writes into later prompts.
COHERE2 = Calls(
    format="cohere2",
    trigger="<|START_ACTION|>",
    section=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    between=",\n    ",
    arguments=Json(fields=("tool_name", "parameters"), number="tool_call_id"),
    accepts=(
        Calls(
            format="cohere2",
            trigger="<|START_ACTION|>",
            section=("<|START_ACTION|> [", "] <|END_ACTION|>"),
            between=",",
            arguments=Json(fields=("tool_name", "parameters"), number="tool_call_id"),
        ),
    ),
    template=("<|START_ACTION|>", "tool_name"),
)


def _addressed(trigger: str, header: str, *, written: bool = False) -> Calls:
    """A call in another order of the header, or with other words in it: all are read up to the body."""
    ends = () if written else (" ", "<|channel|>", "<|constrain|>")
    return Calls(
        format="harmony",
        trigger=trigger,
        call=(trigger, ""),
        name=("", header),
        name_ends=ends,
        arguments=Json(),
        parallel=False,
        written=written,
    )


# <|call|> ends the reply, so it is not part of the call.
HARMONY = Calls(
    format="harmony",
    trigger="<|channel|>commentary to=functions.",
    lead="\n\n",
    call=("<|channel|>commentary to=functions.", ""),
    name=("", " <|constrain|>json<|message|>"),
    arguments=Json(),
    parallel=False,
    ends=("<|call|>",),
    inside=("<|constrain|>",),
    accepts=(
        _addressed(" to=functions.", "<|channel|>commentary <|constrain|>json<|message|>", written=True),
        _addressed(" to=functions.", "<|channel|>commentary json<|message|>", written=True),
        _addressed(" to=functions.", "<|message|>"),
        _addressed("<|channel|>commentary to=functions.", "<|message|>"),
        _addressed("<|channel|>analysis to=functions.", "<|message|>"),
    ),
    message=True,
    template=("<|channel|>commentary", "functions"),
)

# The models were trained with JSON too, which their makers' guide offers.
LFM2 = Calls(
    format="lfm2",
    trigger="<|tool_call_start|>",
    section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
    call=("", ")"),
    between=", ",
    name=("", "("),
    arguments=Keywords(),
    accepts=tuple(
        Calls(
            format="lfm2",
            trigger="<|tool_call_start|>",
            section=section,
            between=", ",
            arguments=Json(fields=("name", "arguments")),
        )
        for section in (
            ("<|tool_call_start|>[", "]<|tool_call_end|>"),
            ("<|tool_call_start|>", "<|tool_call_end|>"),
        )
    ),
    template=("<|tool_list_start|>",),
)

#: the dialects in the order in which a template is asked for their texts: the most specific first
TOOL_FORMATS = (
    HARMONY,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    MISTRAL_V11,
    MISTRAL_V7,
    MINIMAX_M2,
    SEED_OSS,
    COHERE2,
    LFM2,
    QWEN_XML,
    GLM47,
    GLM45,
    SMOLLM2,
    HERMES,
    LLAMA3,
)


class ChosenCalls(NamedTuple):
    """A dialect and the reason for it."""

    calls: Calls
    #: for people: what decided
    why: str


def choose_calls(source: str | None, family: Calls, name: str = "auto") -> ChosenCalls:
    """The dialect of a model: that of `name` unless it is auto, else that of which the chat template holds the texts,
    else the family's. A model whose template shows no tools is told to write Hermes' format.

    Raises ValueError that lists the names for an unknown one.
    """
    if name != "auto":
        found = next((calls for calls in TOOL_FORMATS if calls.format == name), None)
        if found is None:
            raise ValueError(f"expected auto, {', '.join(calls.format for calls in TOOL_FORMATS)}")
        return ChosenCalls(found, "--tool-format")
    if not shows_tools(source):
        return ChosenCalls(HERMES, "the chat template shows no tools")
    for calls in TOOL_FORMATS:
        if calls.template and all(text in str(source) for text in calls.template):
            return ChosenCalls(calls, "the chat template")
    return ChosenCalls(family, "the family")


def shows_tools(source: str | None) -> bool:
    """Whether a chat template has a place for tools."""
    return source is not None and re.search(r"\btools\b", source) is not None
