"""Lines to and from a template's process: every JSON value comes back, and no document of a line is long."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce.text import template, template_message
from luce.text.template import ChatTemplate
from luce.text.template_message import pack, unpack

LONGEST = 1 << 18
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_any_value_comes_back(value: Any) -> None:
    line = pack(value)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert unpack(line) == value


LARGE: dict[str, Any] = {
    "text": "é\x1e\n\ud800" * LONGEST,
    "list": ["x" * 10] * 100_000,
    "numbers": [[1]] * 100_000,
    "keys": {f"key {i}": i for i in range(100_000)},
    "messages": {"messages": [{"role": "user", "content": "a" * (LONGEST + 1)}] * 3, "tools": [["b" * 9999] * 99, ()]},
    "nested": [["", [{"c": [["d"]] * 9999}]] for _ in range(20)],
}


@pytest.mark.parametrize("name", LARGE)
def test_large_values_are_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, read = list[int](), list[int]()
    dumps, loads = json.dumps, json.loads

    def dumped(part: Any, **options: Any) -> str:
        written.append(len(text := dumps(part, **options)))
        return text

    def loaded(text: str) -> Any:
        read.append(len(text))
        return loads(text)

    monkeypatch.setattr(template_message.json, "dumps", dumped)
    monkeypatch.setattr(template_message.json, "loads", loaded)
    assert unpack(pack(LARGE[name])) == loads(dumps(LARGE[name]))
    # A character is at most 6 bytes.
    assert len(written) == len(read) > 3 and max(*written, *read) <= 6 * LONGEST + 3


def test_no_value_passes_for_a_cut_one() -> None:
    line = pack({"a": "b" * 2 * LONGEST})
    mark = json.loads(line.split(b"\x1e")[0])
    own = {mark: [0, 1], "text": "c" * 2 * LONGEST}
    assert unpack(pack(own)) == own


@pytest.mark.parametrize("value", [object(), {1.5j: 2}, float])
def test_what_is_no_json(value: Any) -> None:
    with pytest.raises(TypeError):
        pack(value)


def test_the_collector_is_off_while_values_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, bool] = {}

    def seeing(call: Any) -> Any:
        def called(value: Any) -> Any:
            seen[call.__name__] = gc.isenabled()
            return call(value)

        return called

    made = ChatTemplate("{{ messages }}")
    for call in (pack, unpack):
        monkeypatch.setattr(template, call.__name__, seeing(call))
    made.render([])
    made.close()
    assert seen == {"pack": False, "unpack": False} and gc.isenabled()
