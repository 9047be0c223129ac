"""The status of the web UI in Chromium: the numbers of `luce top`, moving, in every state of the server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from luce.cli.server_status import Reading, summary
from luce.draft.ngram import NgramDrafter
from luce.runtime.device import Memory
from luce.shard.shard import DaemonState
from tests.support.browser import browser_page
from tests.support.http_server import Running, running
from tests.support.scripted_model import REPLY, saying

if TYPE_CHECKING:
    from playwright.async_api import Page

GiB = 1 << 30
ENDLESS: dict[str, Any] = {"context": 8192, "delay": 0.02, "script": saying("on and ", end=False)}
UNAVAILABLE = "503 (Service Unavailable)"


async def tile(page: Page, label: str) -> str:
    """The value of a tile."""
    return await page.locator("#figures div", has=page.get_by_text(label, exact=True)).locator("dd").inner_text()


async def rows(page: Page, caption: str) -> list[list[str]]:
    """The cells of a table; spaces that do not break as spaces."""
    found = page.get_by_role("table", name=caption).locator("tbody tr")
    return [
        [cell.replace("\xa0", " ") for cell in await row.locator("td").all_inner_texts()] for row in await found.all()
    ]


def daemon(shard: int, device: str, *, up: bool, restarts: int = 0) -> DaemonState:
    """A shard in a daemon."""
    return DaemonState(shard, device, up, restarts, "stream", gpu_waits=False, moved={}, waited=None)


async def raw(here: Running) -> dict[str, Any]:
    """What the four endpoints say."""
    models = (await here.get("/v1/models"))[1]["data"]
    found = {path: (await here.get(f"/{path}"))[1] for path in ("props", "slots", "metrics")}
    return {"models": models, **found}


def reading(at: float, said: dict[str, Any]) -> Reading:
    """The reading of `luce top`."""
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(said["metrics"]):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Reading(at, said["models"], said["props"], said["slots"], samples)


IN_THE_PAGE = """async ([first, second]) => {
  const { summary } = await import("/webui/summary.js");
  const { parseMetrics } = await import("/webui/prometheus.js");
  const reading = (at, said) => ({ ...said, at, samples: parseMetrics(said.metrics) });
  const before = reading(10, first), now = reading(12.5, second);
  return [summary(before, null), summary(now, before), summary(before, now)];
}"""


async def test_the_numbers_are_those_of_luce_top() -> None:
    model = {"context": 2048, "drafter": NgramDrafter(block=7)}
    async with running(parallel=3, verify_width=8, model=model) as here, browser_page(here.url) as page:
        here.model.left = {"cpu:0": Memory(3 * GiB, 8 * GiB)}
        here.model.shard_daemons = (daemon(1, "cpu:1", up=False, restarts=2),)
        await here.chat("a" * 200)
        first = await raw(here)
        for text in ("a" * 200, REPLY * 3):
            await here.chat(text)
        second = await raw(here)
        before, now = reading(10, first), reading(12.5, second)
        expected = [summary(before, None), summary(now, before), summary(before, now)]
        assert expected[1]["per_second"]["generated"] > 0 and expected[1]["draft"]["acceptance"] is not None
        assert await page.evaluate(IN_THE_PAGE, [first, second]) == expected


async def test_labels_and_numbers_of_metrics() -> None:
    text = 'a{x="1 \\" } 2 \\\\ \\n,",y="é"} 1e+06\n# HELP a 7\n# TYPE a counter\nb 2 1700000000\n'
    text += 'c{le="+Inf"} +Inf\na{} NaN\n'
    async with running() as here, browser_page(here.url) as page:
        script = 'async (text) => [...(await import("/webui/prometheus.js")).parseMetrics(text)]'
        found = dict(await page.evaluate(script, text))
        assert found["a"][0] == {"labels": {"x": '1 " } 2 \\ \n,', "y": "é"}, "value": 1e6}
        assert found["a"][1]["labels"] == {} and found["a"][1]["value"] != found["a"][1]["value"]
        assert found["b"] == [{"labels": {}, "value": 2}] and found["c"][0]["value"] == float("inf")


async def test_all_of_it_moves() -> None:
    async with running(parallel=1, model=ENDLESS) as here, browser_page(f"{here.url}/#status") as page:
        here.model.left = {"cpu:0": Memory(2 * GiB, 8 * GiB)}
        await page.get_by_text("0 of 1 busy, 0 queued").wait_for()
        assert await rows(page, "Slots") == [["0, idle", "–", "–"]]
        body = {"messages": [{"role": "user", "content": "secret " * 20}], "max_tokens": 400, "ignore_eos": True}
        work = [asyncio.create_task(here.post("/v1/chat/completions", body)) for _ in range(2)]
        await page.get_by_text("1 of 1 busy, 1 queued").wait_for()
        (slot,) = await rows(page, "Slots")
        await page.locator("#figures").get_by_text("Generated tokens per second").wait_for()
        values = {await tile(page, "Generated tokens per second")}
        while len(values) < 4:
            await asyncio.sleep(0.3)
            values.add(await tile(page, "Generated tokens per second"))
        assert (await rows(page, "Slots"))[0][2] != slot[2] and slot[0] == "0" and " of " in slot[1]
        assert (await rows(page, "Devices"))[0] == ["cpu:0", "0..2", "300 B", "6.0 GiB of 8.0 GiB"]
        assert (await rows(page, "Devices"))[1][3] == "not known"
        assert await page.locator("#curves canvas").count() == 3
        label = await page.get_by_role("img", name="Generated tokens per second").get_attribute("aria-label")
        assert label is not None and float(label.rpartition(": ")[2]) >= 0
        assert "secret" not in await page.content()
        for task in work:
            task.cancel()
        await page.get_by_text("0 of 1 busy, 0 queued").wait_for()
        assert (await tile(page, "Time to first token")).endswith(("ms", "s"))
        await asyncio.gather(*work, return_exceptions=True)


async def test_daemons_and_drafting() -> None:
    model = {"context": 2048, "drafter": NgramDrafter(block=7)}
    async with running(verify_width=8, model=model) as here, browser_page(expected=(UNAVAILABLE,)) as page:
        here.model.shard_daemons = (daemon(0, "cuda:0", up=True), daemon(1, "cpu:1", up=False, restarts=3))
        await page.goto(f"{here.url}/#status")
        await page.get_by_role("table", name="Daemons").wait_for()
        assert await rows(page, "Daemons") == [["cuda:0", "up", "0"], ["cpu:1", "DOWN", "3"]]
        assert await tile(page, "Drafting") == "on"
        # The numbers stay in view when a daemon is lost for good.
        here.model.gone = "shard 1 (cpu:1) is lost"
        await page.locator("#status-note", has_text="The server reports an error: shard 1 (cpu:1) is lost").wait_for()
        here.model.shard_daemons = (daemon(0, "cuda:0", up=False), here.model.shard_daemons[1])
        await page.get_by_role("table", name="Daemons").get_by_text("DOWN").nth(1).wait_for()


@pytest.mark.parametrize("view", ["chat", "status"])
async def test_a_server_that_loads_and_drains(view: str) -> None:
    async with running(loaded=False) as here, browser_page(f"{here.url}/#{view}", expected=(UNAVAILABLE,)) as page:
        here.server.pool.default.progress = 0.43
        status = page.get_by_role("status")
        await status.get_by_text("The model is being loaded: 43 %").wait_for()
        here.server.model = here.model  # type: ignore[assignment]
        await status.get_by_text("Connected").wait_for()
        here.server.draining = True
        await status.get_by_text("The server is shutting down.").wait_for()
