"""The chat of the web UI in Chromium, against the application over a scripted model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from luce.api import Model
from luce.config.settings import Config
from luce.server.model_pool import ModelEntry, ModelPool
from tests.support.browser import browser_page
from tests.support.client_programs import recorded
from tests.support.http_server import running
from tests.support.relay import Relay
from tests.support.scripted_model import REPLY, ScriptedModel, saying

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page, Route

#: a reply that goes on until it is stopped
ENDLESS: dict[str, Any] = {"context": 8192, "delay": 0.01, "script": saying("on and ", end=False)}
MARKDOWN = "<think>First *this*.</think># Title\n\nSome **bold** and `code`.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
NO_KEY = "401 (Unauthorized)"


async def say(page: Page, text: str) -> None:
    """Send a message with the keyboard."""
    await page.get_by_role("textbox", name="Message").fill(text)
    await page.keyboard.press("Enter")


async def ended(page: Page) -> Locator:
    """The last reply, when it has ended."""
    await page.get_by_role("button", name="Regenerate").wait_for()
    return page.locator("article.assistant").last


async def shown(reply: Locator) -> str:
    """The text of a reply."""
    return (await reply.locator(".content").inner_text()).strip()


async def test_a_chat_to_its_end() -> None:
    async with running() as here, browser_page(here.url) as page:
        with recorded() as bodies:
            await say(page, "hi")
            reply = await ended(page)
            assert await shown(reply) == REPLY and "tokens per second" in await reply.inner_text()
            assert await reply.get_by_role("heading").inner_text() == "scripted"
            await say(page, "and now?")
            await page.locator("article").nth(3).wait_for()
            assert await shown(await ended(page)) == REPLY
        sent = [json.loads(body) for body in bodies]
        assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
        assert sent[1]["messages"][1]["content"] == REPLY and "model" not in sent[0]


async def test_markdown_and_folded_reasoning() -> None:
    model = {"context": 2048, "script": saying(MARKDOWN)}
    async with running(model=model) as here, browser_page(here.url) as page:
        with recorded() as bodies:
            await say(page, "hi")
            reply = await ended(page)
            assert await reply.locator("h1").inner_text() == "Title"
            assert await reply.locator("strong, code, td").all_inner_texts() == ["bold", "code", "1", "2"]
            reasoning = reply.locator(".reasoning")
            assert not await reasoning.is_visible()
            await reply.get_by_text("Reasoning").click()
            assert await reasoning.locator("em").inner_text() == "this"
            await say(page, "more")
            await page.locator("article").nth(3).wait_for()
            await ended(page)
        assert json.loads(bodies[1])["messages"][1]["reasoning_content"] == "First *this*."


@pytest.mark.parametrize("key", ["Escape", "button"])
async def test_stop(key: str) -> None:
    async with running(model=ENDLESS) as here, browser_page(here.url) as page:
        await say(page, "go on")
        await page.get_by_text("on and on and").wait_for()
        if key == "button":
            await page.get_by_role("button", name="Stop").click()
        else:
            await page.keyboard.press(key)
        reply = await ended(page)
        assert "Stopped." in await reply.inner_text() and (await shown(reply)).startswith("on and")
        # The server has stopped as well.
        await here.quiet()


async def test_a_reload_keeps_the_conversation() -> None:
    async with running(model=ENDLESS) as here, browser_page(here.url) as page:
        await say(page, "go on")
        await page.get_by_text("on and on and").wait_for()
        await page.reload()
        assert (await shown(await ended(page))).startswith("on and on and")
        assert await page.locator("article.user .content").inner_text() == "go on"
        await here.quiet()
        # Another tab has a conversation of its own, and finds this one.
        other = await page.context.new_page()
        await other.goto(here.url)
        await other.get_by_role("combobox", name="Conversation").wait_for()
        assert await other.locator("article").count() == 0
        await other.get_by_role("combobox", name="Conversation").select_option("go on")
        assert (await shown(await ended(other))).startswith("on and on and")


async def test_regenerate() -> None:
    async with running() as here, browser_page(here.url) as page:
        with recorded() as bodies:
            await say(page, "hi")
            await ended(page)
            await page.get_by_role("button", name="Regenerate").click()
            await here.until(lambda: len(bodies) == 2)
            assert await shown(await ended(page)) == REPLY
            assert await page.locator("article").count() == 2
        first, second = (json.loads(body)["messages"] for body in bodies)
        assert first == second == [{"role": "user", "content": "hi"}]


async def test_system_prompt_and_sampling() -> None:
    async with running(model={"context": 2048}, temperature=0.3) as here, browser_page(here.url) as page:
        await page.get_by_text("Connected").wait_for()
        await page.get_by_role("button", name="Options").click()
        assert await page.get_by_label("Temperature").get_attribute("placeholder") == "0.3"
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Temperature").fill("3")
        await page.get_by_role("button", name="Use", exact=True).click()
        # The browser refuses what the server would refuse.
        assert await page.get_by_label("Temperature").is_visible()
        await page.get_by_label("Temperature").fill("0")
        await page.get_by_label("Longest reply").fill("4")
        await page.get_by_label("Reasoning effort").select_option("none")
        await page.get_by_role("button", name="Use", exact=True).click()
        with recorded() as bodies:
            await say(page, "hi")
            reply = await ended(page)
        assert "reached its limit of tokens" in await reply.inner_text()
        body = json.loads(bodies[0])
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["temperature"], body["max_completion_tokens"], body["reasoning_effort"]) == (0, 4, "none")
        assert "top_p" not in body and "seed" not in body


async def test_an_error_is_shown_and_the_text_is_not_lost() -> None:
    async with running() as here, browser_page(here.url, expected=("400 (Bad Request)",)) as page:
        await say(page, "x" * 600)
        await page.get_by_text("maximum context length is 512 tokens").wait_for()
        assert await page.locator("article.user .content").inner_text() == "x" * 600
        await page.get_by_role("button", name="Try again").wait_for()


async def test_export(tmp_path: Path) -> None:
    model = {"context": 2048, "script": saying(MARKDOWN)}
    async with running(model=model) as here, browser_page(here.url) as page:
        await say(page, "hi")
        await ended(page)
        saved = {}
        for name in ("Markdown", "JSON"):
            async with page.expect_download() as download:
                await page.get_by_role("button", name=f"Export {name}").click()
            saved[name] = Path(await (await download.value).path()).read_text()
        assert saved["Markdown"].startswith(
            "## User\n\nhi\n\n## scripted\n\n```reasoning\nFirst *this*.\n```\n\n# Title"
        )
        user, assistant = json.loads(saved["JSON"])["messages"]
        assert user == {"role": "user", "content": "hi"} and assistant["content"] in MARKDOWN


async def test_new_and_deleted_conversations() -> None:
    async with running() as here, browser_page(here.url) as page:
        for text in ("first", "second"):
            await page.get_by_role("button", name="New").click()
            await say(page, text)
            await ended(page)
        picker = page.get_by_role("combobox", name="Conversation")
        assert await picker.locator("option").all_inner_texts() == ["second", "first"]
        page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
        await page.get_by_role("button", name="Delete").click()
        await picker.get_by_text("second").wait_for(state="detached")
        assert await page.locator("article").count() == 0
        await picker.select_option("first")
        assert await page.locator("article.user .content").inner_text() == "first"


async def test_keys() -> None:
    async with running(api_key=("sesame",)) as here, browser_page(here.url, expected=(NO_KEY,)) as page:
        await page.get_by_text("This server needs a key.").wait_for()
        await page.get_by_label("Key of this server").fill("wrong")
        await page.keyboard.press("Enter")
        await page.get_by_text("The server refuses this key.").wait_for()
        await page.get_by_label("Key of this server").fill("sesame")
        await page.keyboard.press("Enter")
        await page.get_by_text("Connected").wait_for()
        await say(page, "hi")
        assert await shown(await ended(page)) == REPLY
        assert "sesame" not in page.url
        assert "sesame" not in await page.evaluate("JSON.stringify(localStorage) + document.cookie")
        # The tab keeps it over a reload; another tab asks.
        await page.reload()
        await page.get_by_text("Connected").wait_for()
        other = await page.context.new_page()
        await other.goto(here.url)
        await other.get_by_text("This server needs a key.").wait_for()


async def test_a_key_that_was_changed_meanwhile() -> None:
    async with running(api_key=("sesame",)) as here, browser_page(here.url, expected=(NO_KEY,)) as page:
        await page.get_by_label("Key of this server").fill("sesame")
        await page.keyboard.press("Enter")
        await page.get_by_text("Connected").wait_for()
        await page.evaluate("sessionStorage.setItem('luce.key', '\"old\"')")
        await say(page, "hi")
        await page.get_by_text("The server refuses this key.").wait_for()
        await page.get_by_label("Key of this server").fill("sesame")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Try again").click()
        assert await shown(await ended(page)) == REPLY


async def test_a_server_that_goes_and_comes_back() -> None:
    gone = ("net::ERR_",)
    async with running(model=ENDLESS) as here, browser_page(expected=gone) as page:
        relay = Relay(here.port)
        await relay.mend()
        await page.goto(relay.url)
        await say(page, "go on")
        await page.get_by_text("on and on and").wait_for()
        await relay.cut()
        reply = await ended(page)
        assert (await shown(reply)).startswith(
            "on and"
        ) and "connection to the server was lost" in await reply.inner_text()
        await page.get_by_role("status").get_by_text("The server does not answer.").wait_for()
        await say(page, "are you there?")
        await page.locator("article .note", has_text="The server does not answer.").wait_for()
        here.model.backend.script = saying(REPLY)
        await relay.mend()
        await page.get_by_text("Connected").wait_for()
        await page.get_by_role("button", name="Try again").click()
        assert await shown(await ended(page)) == REPLY
        assert await page.locator("article").count() == 4
        await relay.cut()


async def test_a_model_of_several() -> None:
    def opened(entry: ModelEntry, progress: Callable[[float], None]) -> Model:
        return cast(Model, ScriptedModel(entry.config, script=saying(f"I am {entry.name}.")))

    entries = [ModelEntry(name, name, Config(alias=(name,))) for name in ("small", "large")]
    async with (
        running(pool=ModelPool(entries, opened)) as here,
        browser_page(here.url, expected=("503 (Service Unavailable)",)) as page,
    ):
        await page.get_by_role("combobox", name="Model").select_option("large")
        await say(page, "who are you?")
        assert await shown(await ended(page)) == "I am large."
        await page.reload()
        assert await page.get_by_role("combobox", name="Model").input_value() == "large"
        await page.get_by_role("combobox", name="Model").select_option("small")
        await say(page, "and now?")
        await page.locator("article").nth(3).wait_for()
        assert await shown(await ended(page)) == "I am small."


async def test_a_model_that_is_being_loaded() -> None:
    gate = threading.Event()

    def opened(entry: ModelEntry, progress: Callable[[float], None]) -> Model:
        assert gate.wait(30)
        return cast(Model, ScriptedModel(entry.config))

    entries = [ModelEntry(name, name, Config(alias=(name,))) for name in ("small", "large")]
    async with (
        running(pool=ModelPool(entries, opened, wait=0.05)) as here,
        browser_page(here.url, expected=("503 (Service Unavailable)",)) as page,
    ):
        await page.get_by_role("combobox", name="Model").wait_for()
        await say(page, "hi")
        # The stream begins with comments, and has the reply once the model is there.
        await page.get_by_text("Waiting for the server…").wait_for()
        gate.set()
        assert await shown(await ended(page)) == REPLY


async def test_a_server_that_starts_answers_what_was_asked_before() -> None:
    asked: list[str] = []
    async with running(loaded=False) as here, browser_page(here.url, expected=("503 (Service Unavailable)",)) as page:
        page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
        await say(page, "hi")
        await page.get_by_text("Waiting: the model is being loaded").wait_for()
        # 503 with Retry-After again and again, until the server is ready.
        await here.until(lambda: len(asked) > 2)
        here.server.model = cast(Model, here.model)
        assert await shown(await ended(page)) == REPLY
        assert await page.locator("article.user .content").all_inner_texts() == ["hi"]


async def test_a_full_queue_is_waited_for() -> None:
    expected = ("503 (Service Unavailable)",)
    async with (
        running(parallel=1, max_queue=1, model=ENDLESS) as here,
        browser_page(here.url, expected=expected) as page,
    ):
        # The text is drawn at random, so an end token may come.
        body = {"prompt": "go on", "max_tokens": 4000, "ignore_eos": True}
        others = [asyncio.create_task(here.post("/v1/completions", body)) for _ in range(2)]
        stats = here.model.engine.stats
        await here.until(lambda: (stats().running, stats().waiting) == (1, 1))
        await say(page, "hi")
        await page.get_by_text("Waiting: 1 requests wait already (--max-queue)").wait_for()
        here.model.backend.script = saying(REPLY)
        for other in others:
            other.cancel()
        assert await shown(await ended(page)) == REPLY
        await asyncio.gather(*others, return_exceptions=True)


async def test_stop_ends_the_pause_before_the_next_request() -> None:
    asked = 0

    async def refuse(route: Route) -> None:
        nonlocal asked
        asked += 1
        error = {"message": "the server is shutting down", "code": "draining"}
        await route.fulfill(status=503, json={"error": error}, headers={"Retry-After": "3600000"})

    async with running() as here, browser_page(here.url, expected=("503 (Service Unavailable)",)) as page:
        await page.route("**/v1/chat/completions", refuse)
        await say(page, "hi")
        await page.get_by_text("Waiting: the server is shutting down").wait_for()
        await page.get_by_role("button", name="Stop").click()
        await page.get_by_text("Stopped.").wait_for()
        assert asked == 1
        await page.unroute("**/v1/chat/completions")
        await page.get_by_role("button", name="Try again").click()
        assert await shown(await ended(page)) == REPLY


async def test_a_refusal_without_a_time_is_not_repeated() -> None:
    asked = 0

    async def refuse(route: Route) -> None:
        nonlocal asked
        asked += 1
        await route.fulfill(status=503, body="no upstream")

    async with running() as here, browser_page(here.url, expected=("503 (Service Unavailable)",)) as page:
        await page.route("**/v1/chat/completions", refuse)
        await say(page, "hi")
        await page.get_by_text("The server answered 503").wait_for()
        await page.get_by_role("button", name="Try again").wait_for()
        assert asked == 1
