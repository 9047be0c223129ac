"""Configuration files changed in place: what the formats' own parsers read afterwards, and the text that stays."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from luce.cli.clients.formats import JSON, TOML, VARIABLES, YAML, Format, FormatProblem

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)
PLAIN = st.one_of(TEXTS, st.integers(-(2**40), 2**40), st.booleans())
OBJECTS = st.dictionaries(NAMES, st.one_of(PLAIN, st.dictionaries(NAMES, PLAIN, max_size=3)), max_size=5)


@pytest.mark.parametrize("form, parse", [(JSON, json.loads), (TOML, tomllib.loads)], ids=["JSON", "TOML"])
@given(changes=OBJECTS)
def test_a_new_file_holds_the_changes(form: Format, parse: Any, changes: dict[str, Any]) -> None:
    assert parse(form.edit("", changes) or "{}" * (form is JSON)) == changes


@given(old=OBJECTS, changes=OBJECTS)
def test_other_settings_stay(old: dict[str, Any], changes: dict[str, Any]) -> None:
    found = json.loads(JSON.edit(json.dumps(old), changes) or "{}")
    for name in {*old, *changes}:
        before, new = old.get(name), changes.get(name, old.get(name))
        assert found[name] == ({**before, **new} if isinstance(before, dict) and isinstance(new, dict) else new)
    # The same again changes nothing.
    text = JSON.edit(json.dumps(old), changes)
    assert JSON.edit(text, changes) == text


TOML_FILE = """# my file
model = "old"    # the one I like
approval_policy = "never"
notes = '''
[model_providers.luce]
'''

[mcp_servers.files]  # mine
command = "files"
args = ["a",
  "b"]

[model_providers.luce]
base_url = "http://old"
query_params = { a = "1" }

[tui]
theme = "dark"
"""


def test_toml_keeps_comments_and_order() -> None:
    changes = {"model": "new", "window": 4096, "model_providers": {"luce": {"base_url": "http://new", "wire": "r"}}}
    old = TOML_FILE.replace("notes = '''\n[model_providers.luce]\n'''\n", "")
    assert TOML.edit(old, changes) == (
        old.replace('model = "old"    # the one I like', 'model = "new"')
        .replace('"never"\n', '"never"\nwindow = 4096\n')
        .replace('"http://old"\nquery_params = { a = "1" }\n', '"http://new"\nquery_params = { a = "1" }\nwire = "r"\n')
    )


@pytest.mark.parametrize(
    "text",
    [
        # A header inside a text, a table in line, and keys with dots: lines do not tell what they belong to.
        TOML_FILE,
        'model_providers = { luce = { base_url = "http://old" } }\n',
        'model_providers.luce.base_url = "http://old"\n',
    ],
)
def test_toml_that_cannot_be_changed_line_by_line_is_left_alone(text: str) -> None:
    with pytest.raises(FormatProblem, match="in place"):
        TOML.edit(text, {"model_providers": {"luce": {"base_url": "http://new"}}})


ITEM = {"model_id": "luce", "model_name": "new", "supports_tools": True}
YAML_FILE = """# models
- model_id: other   # keep
  model_name: gpt
- model_id: luce
  model_name: "old"  # was
  api_base: http://old
# the end
"""


def test_yaml_changes_the_item_of_the_same_id() -> None:
    found = YAML.edit(YAML_FILE, ITEM)
    assert found == YAML_FILE.replace('"old"', '"new"').replace(
        "- model_id: luce", '- supports_tools: true\n  model_id: "luce"'
    )
    assert yaml.safe_load(found)[1] == {**ITEM, "api_base": "http://old"}


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "- model_id: a\n", "  - model_id: a\n    model_name: b"])
def test_yaml_appends_a_new_item(text: str) -> None:
    found = YAML.edit(text, ITEM)
    assert found.startswith(text) and yaml.safe_load(found) == [*(yaml.safe_load(text) or []), ITEM]


def test_yaml_in_one_line_is_left_alone() -> None:
    with pytest.raises(FormatProblem, match="in place"):
        YAML.edit("[{model_id: a}]\n", ITEM)


def test_variables_are_replaced_in_their_lines() -> None:
    text = "# mine\nexport OTHER='a b'\nAIDER_MODEL=old\n\nLAST=1\n"
    found = VARIABLES.edit(text, {"AIDER_MODEL": "openai/new", "NEW": "http://127.0.0.1:80/v1"})
    assert found == text.replace("=old", "=openai/new") + "NEW=http://127.0.0.1:80/v1\n"


@pytest.mark.parametrize("value", ["a b", "$HOME", "it's", 'say "x"', "a#b", "a\nb"])
def test_a_value_that_programs_read_differently_is_refused(value: str) -> None:
    with pytest.raises(FormatProblem, match="KEY"):
        VARIABLES.edit("", {"KEY": value})


@pytest.mark.parametrize(
    "form, text",
    [
        (JSON, '{"a": 1, // a comment\n}'),
        (JSON, "[1]"),
        (JSON, '{"env": '),
        (TOML, "a = "),
        (YAML, "a: [1"),
        (YAML, "a: 1"),
        (YAML, "- a"),
        (VARIABLES, "if true; then A=1; fi"),
    ],
)
def test_a_text_of_another_form_is_left_alone(form: Format, text: str) -> None:
    with pytest.raises(FormatProblem):
        form.edit(text, {"model_id": "x"})


def test_a_value_in_the_place_of_an_object_is_replaced() -> None:
    assert json.loads(JSON.edit('{"env": 1, "b": 2}', {"env": {"A": "1"}})) == {"env": {"A": "1"}, "b": 2}


def test_json_keeps_its_indent() -> None:
    assert JSON.edit('{\n\t"a": 1\n}', {"b": 2}) == '{\n\t"a": 1,\n\t"b": 2\n}\n'
