"""luce/text/schema_refs.py, against the package `referencing`."""

from __future__ import annotations

from typing import Any

import pytest
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from luce.text.schema_refs import References

SCHEMA: dict[str, Any] = {
    "$anchor": "whole",
    "properties": {"next": {"$ref": "#"}},
    "$defs": {
        "a/b": {"const": 1},
        "m~n": {"const": 2},
        "50%": {"const": 3},
        "two words": {"const": 4},
        "~1": {"const": 5},
        "": {"const": 6},
        "marked": {"$anchor": "here", "items": {"prefixItems": [{"const": 7}, {"$anchor": "inner.one", "const": 8}]}},
    },
}


def expected(reference: str) -> Any:
    resource = DRAFT202012.create_resource(SCHEMA)
    try:
        return Registry().with_resource("", resource).resolver().lookup(reference).contents
    except Unresolvable:
        return None


@pytest.mark.parametrize(
    "reference",
    [
        "#",
        "#whole",
        "#/properties/next",
        "#/$defs/a~1b",
        "#/%24defs/a~1b",
        "#/$defs/m~0n",
        "#/$defs/50%25",
        "#/$defs/two%20words",
        "#/$defs/~01",
        "#/$defs/",
        "#/$defs/marked/items/prefixItems/1",
        "#here",
        "#inner.one",
    ],
)
def test_a_reference_leads_where_the_standard_says(reference: str) -> None:
    found = References(SCHEMA).find(reference)
    assert found is not None and found.schema is not None
    assert found.schema == expected(reference)


@pytest.mark.parametrize("reference", ["#/$defs/none", "#none", "#/$defs/marked/items/prefixItems/2", "#/$defs/a/b"])
def test_a_reference_may_lead_nowhere(reference: str) -> None:
    assert expected(reference) is None
    assert References(SCHEMA).find(reference) is None


def test_other_documents_are_not_read() -> None:
    assert References(SCHEMA).find("http://elsewhere/#/$defs") is None


def test_the_target_of_an_anchor_has_its_place() -> None:
    found = References({"$defs": {"a/~": [{"$anchor": "x"}]}}).find("#x")
    assert found is not None and found.pointer == "/$defs/a~1~0/0"
