"""The table of sampling values: requests, settings and the command line have its names and ranges."""

from __future__ import annotations

import json
from typing import Any

import pytest

from luce.cli import options
from luce.config.resolve import resolve
from luce.config.sampling import SAMPLERS
from luce.config.settings import FIELDS
from luce.errors import RequestError, UsageError
from luce.server.schema import ChatRequest, CompletionRequest, decode


def outside(name: str) -> list[Any]:
    """Values just outside the range."""
    sampler = SAMPLERS[name]
    step: Any = 1 if sampler.kind is int else 0.001
    return [sampler.low if sampler.above else sampler.low - step, sampler.high + step]


# max_tokens has another lowest value in each endpoint.
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "max_tokens"])
def test_requests_have_the_names_and_ranges_of_the_table(name: str) -> None:
    sampler = SAMPLERS[name]
    for kind in (ChatRequest, CompletionRequest):
        for key in (name, *sampler.aliases):
            request, unknown = decode(json.dumps({key: sampler.high}).encode(), kind)
            assert getattr(request, key) == sampler.high and unknown == 0
            for value in outside(name):
                with pytest.raises(RequestError) as refused:
                    decode(json.dumps({key: value}).encode(), kind)
                assert refused.value.param == key


@pytest.mark.parametrize("name", SAMPLERS)
def test_settings_and_options_have_the_ranges_of_the_table(name: str) -> None:
    assert (name in FIELDS) == (SAMPLERS[name].setting is not None)
    for value in outside(name):
        with pytest.raises(UsageError, match=r"^here: expected "):
            options.parse(name, str(value), "here")
        if name in FIELDS:
            with pytest.raises(UsageError, match="expected "):
                resolve({name: value}, env={})
