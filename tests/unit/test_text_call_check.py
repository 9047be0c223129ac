"""luce/text/call_check.py: templates of all dialects pass, and what a template or a wrong dialect spoils is named."""

from __future__ import annotations

import pytest

from luce.models.spec import Dialect
from luce.text.call_check import call_mismatch
from luce.text.chat import ChatFormat
from luce.text.template import ChatTemplate
from tests.support import harmony
from tests.support.tool_templates import TEMPLATES, DialectTemplate, byte_tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_all_dialects_write_what_is_read_back(name: str, special: bool) -> None:
    dialect = harmony.dialect() if name == "harmony" else Dialect()
    chat = ChatFormat(DialectTemplate(name), byte_tokenizer(name, special=special), dialect)
    assert chat.calls.format == name
    assert call_mismatch(chat) is None


@pytest.mark.parametrize(
    ("name", "written", "instead", "why"),
    [
        (
            "hermes",
            "| tojson }}}",
            "| length }}}",
            "read back otherwise (string, integer, number, boolean, array, object)",
        ),
        ("qwen_xml", "{{ v | tojson if", "{{ v | length if", "read back otherwise (array, object)"),
        ("glm47", "else v | tojson", "else 7", "read back otherwise (integer, number, boolean, array, object)"),
        ("glm47", "<arg_key>{{ k }}", "<arg_key>{{ k | upper }}", "a further one, 'COUNT'"),
        (
            "llama3",
            "{% if m.tool_calls %}",
            "{% if m.tool_calls %}{{ raise_exception('no calls') }}",
            "refuses a conversation with a call",
        ),
    ],
)
def test_what_a_template_spoils_is_named(name: str, written: str, instead: str, why: str) -> None:
    assert written in TEMPLATES[name]
    template = ChatTemplate(TEMPLATES[name].replace(written, instead))
    try:
        found = call_mismatch(ChatFormat(template, byte_tokenizer(name), Dialect(), name))
    finally:
        template.close()
    assert found is not None and why in found and "\n" not in found


def test_another_dialect_does_not_read_the_template_and_no_template_has_nothing_to_read() -> None:
    wrong = ChatFormat(DialectTemplate("glm47"), byte_tokenizer("glm47"), Dialect(), "hermes")
    assert call_mismatch(wrong) == "of one call that the chat template writes, 0 are found"
    assert call_mismatch(ChatFormat(None, byte_tokenizer("hermes"))) is None
