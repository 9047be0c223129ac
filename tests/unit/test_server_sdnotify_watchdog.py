"""The watchdog is fed only while the engine makes progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from luce.config.sampling import SamplingParams
from luce.config.settings import Config
from luce.server.sdnotify import Notifier
from tests.support.scripted_model import ScriptedModel


class CountingNotifier(Notifier):
    """Counts the notifications of the watchdog instead of sending them."""

    def __init__(self) -> None:
        super().__init__()
        self.watchdog = 0.1
        self.fed = 0

    def send(self, **states: Any) -> None:
        self.fed += states == {"WATCHDOG": 1}


async def test_a_step_that_hangs_starves_the_watchdog() -> None:
    gate = threading.Event()
    model = await asyncio.to_thread(ScriptedModel, Config(), hook=lambda step: gate.wait() and None)
    manager = CountingNotifier()
    watch = asyncio.create_task(manager.feed_watchdog(lambda: model.engine.stats().stalled))

    async def until(condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await until(lambda: manager.fed >= 2)
    params = SamplingParams(max_tokens=1)
    model.engine.submit([1], params, output=model.reply_text(), on_event=lambda event: None)
    await until(lambda: model.engine.stats().stalled > manager.watchdog)
    fed = manager.fed
    await until(lambda: model.engine.stats().stalled > 5 * manager.watchdog)
    assert manager.fed == fed
    gate.set()
    await until(lambda: manager.fed > fed)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    await asyncio.to_thread(model.close)
