"""The pictures of docs/guide/web-ui.md: a server with smollm2, and Chromium in front of it.

python -m tools.webui_screenshots

Needs the extra `browser`, Debian's chromium, and the model (luce pull smollm2).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).resolve().parent.parent / "docs/guide/images"
SIZE = {"width": 960, "height": 640}
SAMPLING = '{"temperature": 0, "max_completion_tokens": %d}'
QUESTIONS = ("What is the capital of France?", "Write two sentences about it, with its name in bold.")
STORY = "Write a long story about a lighthouse."
#: replies that fill the curves, and the time of the curves in ms
TOKENS, STATUS_MS = 1500, 20_000
#: longest wait, also for the load of the model
WAIT_MS = 180_000


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a server that ends with the block."""
    flags = ["--port", "0", "--parallel", "2", "--max-ctx", "4096", "--kv-cache-dir", "off"]
    command = [sys.executable, "-m", "luce", "serve", "smollm2", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        address = next(found[0] for line in server.stderr if (found := re.search(r"http://[\w.:]+", line)))
        yield address
    finally:
        server.terminate()
        server.communicate()


def opened(browser: Browser, address: str, colours: str, tokens: int) -> Page:
    """The chat, connected, with greedy replies of so many tokens."""
    context = browser.new_context(viewport=SIZE, color_scheme=colours, reduced_motion="reduce")
    context.add_init_script(f"localStorage.setItem('luce.sampling', '{SAMPLING % tokens}')")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(address)
    page.get_by_text("Connected").wait_for()
    return page


def say(page: Page, text: str) -> None:
    """Send a message."""
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def draw(browser: Browser, address: str, colours: str) -> None:
    """The chat and the status in one scheme of colours."""
    page = opened(browser, address, colours, 100)
    for number, question in enumerate(QUESTIONS):
        say(page, question)
        page.locator("article").nth(2 * number + 1).wait_for()
        page.get_by_role("button", name="Regenerate").wait_for()
    page.screenshot(path=FOLDER / f"webui-chat-{colours}.png")
    busy = opened(browser, address, colours, TOKENS)
    page.get_by_role("link", name="Status").click()
    page.wait_for_timeout(STATUS_MS // 4)
    say(busy, STORY)
    page.wait_for_timeout(STATUS_MS)
    page.screenshot(path=FOLDER / f"webui-status-{colours}.png")
    busy.keyboard.press("Escape")


def main() -> int:
    """Draw all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for colours in ("light", "dark"):
            draw(browser, address, colours)
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
