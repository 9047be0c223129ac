"""instructor, which asks for structured replies alone, against the application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.claude_code import AGENT
from tests.support.client_programs import Library, library
from tests.support.http_server import running
from tests.support.scripted_model import saying

Json = dict[str, Any]


@pytest.fixture(scope="module")
def instructor() -> Iterator[Library]:
    with library("openai2", "instructor") as found:
        yield found


def markdown_json(url: str) -> Json:
    """An object from a block of JSON in the text, which needs no support of the server."""
    import instructor
    import openai
    import pydantic

    class City(pydantic.BaseModel):
        name: str
        people: int

    client: Any = instructor.from_openai(
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), mode=instructor.Mode.MD_JSON
    )
    reply = client.chat.completions.create(
        model="m", response_model=City, messages=[{"role": "user", "content": "hi"}], max_retries=0
    )
    return dict(reply.model_dump())


async def test_json_in_the_text(instructor: Library) -> None:
    said = '{"name": "Ulm", "people": 126000}'
    async with running(model={"context": 4096, "script": saying(said + "\n```")}) as here:
        assert await instructor(markdown_json, here.url) == {"name": "Ulm", "people": 126000}


def structured(url: str, mode: str) -> Json:
    """An object of a class, whatever the model would rather say."""
    from typing import Literal

    import instructor
    import openai
    import pydantic

    # Further members, which a schema allows by default, have no end where a model says anything.
    class City(pydantic.BaseModel, extra="forbid"):
        kind: Literal["town", "village"]
        port: bool

    client: Any = instructor.from_openai(
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), mode=getattr(instructor.Mode, mode)
    )
    reply = client.chat.completions.create(
        model="m", response_model=City, messages=[{"role": "user", "content": "hi"}], max_retries=0
    )
    return dict(reply.model_dump())


@pytest.mark.parametrize("mode", ["JSON", "JSON_SCHEMA"])
async def test_structured_output(instructor: Library, mode: str) -> None:
    # In the mode JSON the schema is in the prompt alone.
    wish = '{"kind": "town", "port": true}' if mode == "JSON" else "I would rather not."
    async with running(model={"context": 4096, "script": saying(wish)}) as here:
        found = await instructor(structured, here.url, mode)
    assert found["kind"] in ("town", "village") and isinstance(found["port"], bool)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT"])
async def test_structured_output_by_a_forced_call(instructor: Library, mode: str) -> None:
    async with running(model={**AGENT, "context": 8192, "script": saying("I would rather not.")}) as here:
        found = await instructor(structured, here.url, mode)
    assert found["kind"] in ("town", "village") and isinstance(found["port"], bool)
