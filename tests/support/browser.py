"""Debian's Chromium, driven by Playwright: a page of the web UI, in which nothing may go wrong unseen."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Page

#: longest wait for something on a page, in ms
_WAIT_MS = 30_000


@contextlib.asynccontextmanager
async def browser_page(url: str = "", *, expected: tuple[str, ...] = (), **context: Any) -> AsyncIterator[Page]:
    """A page in a browser of its own, opened at a URL. `context`: width, colours and so on, as in Browser.new_context.
    `expected`: parts of messages in the page's console that may come; any other error there fails the test. Skips where
    Playwright or Chromium is missing."""
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    wrong: list[str] = []
    async with (
        playwright.async_playwright() as started,
        await started.chromium.launch(executable_path=chromium) as browser,
    ):
        page = await (await browser.new_context(**context)).new_page()
        page.set_default_timeout(_WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        if url:
            await page.goto(url)
        yield page
    assert [text for text in wrong if not any(part in text for part in expected)] == []
