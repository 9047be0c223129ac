"""The watchdog is fed only while the engine makes progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, cast

from luce.api import Model
from luce.cli.serve import _Service
from luce.config.sampling import SamplingParams
from luce.config.settings import Config
from luce.server.sdnotify import Notifier
from tests.support.scripted_model import ScriptedModel


class Manager:
    """Stands in for the Notifier."""

    watchdog = 0.1

    def __init__(self) -> None:
        self.fed = 0

    def send(self, **states: Any) -> None:
        self.fed += states == {"WATCHDOG": 1}


async def test_a_step_that_hangs_starves_the_watchdog() -> None:
    gate = threading.Event()
    model = await asyncio.to_thread(ScriptedModel, Config(), hook=lambda step: gate.wait() and None)
    manager = Manager()
    service = _Service(Config(), "m", cast(Notifier, manager), [])
    watch = asyncio.create_task(service._watch(cast(Model, model)))

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
