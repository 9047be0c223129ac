"""The text of a string parameter from pieces of its JSON."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.server.string_argument import StringArgument


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60)))
def test_any_division_gives_the_text(text: str, ascii_only: bool, cuts: list[int]) -> None:
    encoded = json.dumps({"input": text}, ensure_ascii=ascii_only)
    places = sorted({0, len(encoded), *(cut for cut in cuts if cut < len(encoded))})
    found = StringArgument()
    pieces = [found.push(encoded[a:b]) for a, b in itertools.pairwise(places)]
    assert "".join(pieces) == text == found.whole(encoded)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [("{}", ""), ("", ""), ('{"input": 3}', '{"input": 3}'), ("[1]", "[1]"), ('{"x": "a', "a"), ('{"x": "a\\', "a")],
)
def test_what_is_no_whole_string(arguments: str, text: str) -> None:
    found = StringArgument()
    pushed = found.push(arguments)
    assert found.whole(arguments) == text
    # Text that the model did not write as a string comes at the end.
    assert pushed in ("", text)
