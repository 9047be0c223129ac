"""Fields that are refused: which values ask for nothing, and which bodies serve a field after all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from luce.errors import RequestError
from luce.server.unserved import Unserved, refuse_unserved, served_fields, with_unserved


class _Plain(msgspec.Struct, kw_only=True):
    text: str = ""


TABLE = {
    "depth": Unserved("no depth here", (0, 1), int),
    "words": Unserved("no words here", ([],)),
    "anything": Unserved("nothing at all"),
}
if TYPE_CHECKING:
    Base = _Plain
else:
    Base = with_unserved(_Plain, TABLE)


class _Serving(Base, kw_only=True):
    words: list[str] | None = None


@pytest.mark.parametrize("body", ["{}", '{"text": "a", "depth": 1}', '{"depth": 0, "words": [], "anything": null}'])
def test_values_that_ask_for_nothing_pass(body: str) -> None:
    refuse_unserved(msgspec.json.decode(body, type=Base))


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ('{"depth": 2}', "depth", "no depth here"),
        ('{"words": ["a"]}', "words", "no words here"),
        ('{"anything": false}', "anything", "nothing at all"),
        ('{"anything": ""}', "anything", "nothing at all"),
    ],
)
def test_other_values_are_refused_by_name(body: str, param: str, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        refuse_unserved(msgspec.json.decode(body, type=Base))
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    assert str(caught.value) == f"{param}: {why}"


def test_a_value_has_the_type_of_its_field() -> None:
    with pytest.raises(msgspec.ValidationError, match="depth"):
        msgspec.json.decode('{"depth": "deep"}', type=Base)


def test_a_body_that_declares_a_field_serves_it() -> None:
    body = msgspec.json.decode('{"words": ["a"]}', type=_Serving)
    refuse_unserved(body)
    assert body.words == ["a"]
    assert served_fields(_Serving) == {"text", "words"} and served_fields(Base) == {"text"}
    with pytest.raises(RequestError, match="depth"):
        refuse_unserved(msgspec.json.decode('{"depth": 5}', type=_Serving))
