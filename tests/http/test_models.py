"""The catalogue of models, in the forms of OpenAI's, Anthropic's and Codex's clients."""

from __future__ import annotations

from datetime import datetime

import openai
import pytest

from tests.support.http_server import running
from tests.support.lazy import Lazy

anthropic = Lazy("anthropic")

#: the fields without which Codex's ModelInfo cannot be read
CODEX = {
    "slug",
    "display_name",
    "description",
    "supported_reasoning_levels",
    "shell_type",
    "visibility",
    "supported_in_api",
    "priority",
    "upgrade",
    "base_instructions",
    "supports_reasoning_summaries",
    "support_verbosity",
    "default_verbosity",
    "apply_patch_tool_type",
    "truncation_policy",
    "supports_parallel_tool_calls",
    "experimental_supported_tools",
}


async def test_openai() -> None:
    async with running(alias=("a", "b")) as here:
        async with openai.AsyncOpenAI(api_key="k", base_url=here.url + "/v1") as client:
            (model,) = [model async for model in client.models.list()]
            assert (model.id, model.object, model.owned_by) == ("a", "model", "luce")
            assert (await client.models.retrieve("b")).id == "a"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("c")
        entry = (await here.get("/v1/models"))[1]["data"][0]
        assert entry["max_model_len"] == entry["context_length"] == entry["max_output_tokens"] == 512
        assert entry["capabilities"] == ["completion", "chat", "structured_outputs"]


async def test_anthropic() -> None:
    async with running() as here, anthropic.AsyncAnthropic(api_key="k", base_url=here.url) as client:
        page = await client.models.list()
        (model,) = page.data
        assert (model.id, model.type, model.display_name) == ("scripted", "model", "scripted")
        assert isinstance(model.created_at, datetime)
        assert (page.has_more, page.first_id, page.last_id) == (False, "scripted", "scripted")
        assert [model.id async for model in client.models.list()] == ["scripted"]


async def test_codex() -> None:
    async with running(alias=("a", "b")) as here:
        status, body, _ = await here.get("/v1/models?client_version=0.169.0")
        assert status == 200 and set(body) == {"models"}
        (model,) = body["models"]
        assert set(model) >= CODEX
        assert (model["slug"], model["context_window"], model["input_modalities"]) == ("a", 512, ["text"])
        efforts = [level["effort"] for level in model["supported_reasoning_levels"]]
        # Codex's ReasoningEffort has no other values.
        assert set(efforts) <= {"none", "minimal", "low", "medium", "high", "xhigh"}
        assert model["default_reasoning_level"] in efforts
