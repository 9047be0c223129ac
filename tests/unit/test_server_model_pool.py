"""The pool of models: loads, room, pins, ttl, and who waits for what."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from luce.api import Model
from luce.config.settings import Config
from luce.errors import LuceError, ModelError, NotFoundError, OutOfMemoryError, RequestError, UnavailableError
from luce.server.model_pool import ModelEntry, ModelPool


class Loaded:
    """A loaded model as far as the pool knows."""

    def __init__(self, name: str, loader: Loader) -> None:
        self.name = name
        self.closed = False
        self._loader = loader

    def close(self) -> None:
        self.closed = True
        self._loader.log.append(f"close {self.name}")
        self._loader.held -= self._loader.sizes.get(self.name, 0)


class Loader:
    """Opens models in the memory of one device, on threads; `gates` hold a load until they are set."""

    def __init__(self, memory: int = 10**9, **sizes: int) -> None:
        self.log: list[str] = []
        self.sizes = sizes
        self.memory = memory
        self.held = 0
        self.gates: dict[str, threading.Event] = {}
        self.errors: dict[str, LuceError] = {}
        self.running = 0

    def __call__(self, entry: ModelEntry, progress: Callable[[float], None]) -> Model:
        self.running += 1
        assert self.running == 1, "two loads at a time"
        try:
            progress(0.5)
            if gate := self.gates.get(entry.name):
                assert gate.wait(30)
            if error := self.errors.get(entry.name):
                raise error
            if self.held + self.sizes.get(entry.name, 0) > self.memory:
                raise OutOfMemoryError(f"{entry.name} does not fit")
            self.held += self.sizes.get(entry.name, 0)
            self.log.append(f"load {entry.name}")
            return cast(Model, Loaded(entry.name, self))
        finally:
            self.running -= 1


def pool(loader: Loader, *names: str, pinned: tuple[str, ...] = (), ttl: float = 0, **options: Any) -> ModelPool:
    entries = [ModelEntry(name, name, Config(alias=(name,)), pinned=name in pinned, ttl=ttl) for name in names]
    made = ModelPool(entries, loader, **options)
    made.starting = False
    return made


async def use(models: ModelPool, name: str) -> None:
    async with models.lease(models.entry(name)) as model:
        assert cast(Any, model).name == name and not cast(Any, model).closed


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_one_load_for_all_who_wait() -> None:
    loader = Loader()
    models = pool(loader, "a", "b")
    await asyncio.gather(*(use(models, name) for name in "aabaab"))
    await use(models, "a")
    assert sorted(loader.log) == ["load a", "load b"]


async def test_a_load_knows_whether_a_request_waits_for_it() -> None:
    seen: list[int] = []
    loader = Loader()

    def opener(entry: ModelEntry, progress: Callable[[float], None]) -> Any:
        seen.append(entry.waiting_requests)
        return loader(entry, progress)

    models = ModelPool([ModelEntry("a", "a", Config(alias=("a",)))], opener)
    models.starting = False
    await models.load(models.entry("a"))
    await models.unload(models.entry("a"))
    await use(models, "a")
    assert seen == [0, 1]
    assert models.entry("a").waiting_requests == 0


async def test_idle_is_the_time_without_users() -> None:
    models = pool(Loader(), "a", "b")
    await use(models, "a")
    first = models.idle()
    await until(lambda: models.idle() > first)
    before = models.idle()
    async with models.lease(models.entry("b")):
        assert models.idle() == 0
        await asyncio.sleep(2 * before)
        assert models.idle() == 0


async def test_names() -> None:
    models = pool(Loader(), "a", "b")
    assert models.entry(None) is models.default is models.entries[0]
    assert models.entry("b") is models.entries[1]
    with pytest.raises(NotFoundError, match="'c'"):
        models.entry("c")
    # One model answers whatever it is called; --strict-model is a matter of the body.
    assert pool(Loader(), "a").entry("c").name == "a"


async def test_the_least_recently_used_makes_room() -> None:
    loader = Loader()
    models = pool(loader, "a", "b", "c", max_loaded=2)
    for name in ("a", "b", "a", "c", "b"):
        await use(models, name)
    assert loader.log == ["load a", "load b", "close b", "load c", "close a", "load b"]


async def test_memory_makes_room_as_well() -> None:
    loader = Loader(memory=10, a=4, b=4, c=9)
    models = pool(loader, "a", "b", "c")
    for name in ("a", "b", "c", "a"):
        await use(models, name)
    assert loader.log == ["load a", "load b", "close a", "close b", "load c", "close c", "load a"]


async def test_what_fits_nowhere_is_an_error_and_the_next_request_tries_again() -> None:
    loader = Loader(memory=10, a=4, b=20)
    models = pool(loader, "a", "b", pinned=("a",))
    await use(models, "a")
    for _ in range(2):
        with pytest.raises(OutOfMemoryError, match="b does not fit"):
            await use(models, "b")
    loader.sizes["b"] = 5
    await use(models, "b")
    assert loader.log == ["load a", "load b"]


async def test_pinned_models_stay() -> None:
    loader = Loader()
    models = pool(loader, "a", "b", "c", pinned=("a",), max_loaded=2)
    for name in ("a", "b", "c"):
        await use(models, name)
    assert loader.log == ["load a", "load b", "close b", "load c"]
    with pytest.raises(RequestError, match=r"^the model a is pinned$"):
        await models.unload(models.entry("a"))
    all_pinned = pool(Loader(), "a", "b", "c", pinned=("a", "b"), max_loaded=2)
    for name in ("a", "b"):
        await use(all_pinned, name)
    with pytest.raises(UnavailableError, match="pinned"):
        await use(all_pinned, "c")


async def test_a_model_in_use_is_closed_behind_its_requests() -> None:
    loader = Loader()
    models = pool(loader, "a", "b", max_loaded=1)
    async with models.lease(models.entry("a")) as model:
        other = asyncio.create_task(use(models, "b"))
        await until(lambda: models.entry("a").state == "unloading")
        # A new request of the model that leaves waits for its return.
        again = asyncio.create_task(use(models, "a"))
        await asyncio.sleep(0.02)
        assert not cast(Any, model).closed and not other.done() and not again.done()
    await asyncio.gather(other, again)
    assert loader.log == ["load a", "close a", "load b", "close b", "load a"]


async def test_an_idle_model_leaves_before_one_in_use() -> None:
    loader = Loader()
    models = pool(loader, "a", "b", "c", max_loaded=2)
    async with models.lease(models.entry("a")):
        await use(models, "b")
        await use(models, "c")
    assert loader.log == ["load a", "load b", "close b", "load c"]


async def test_a_request_waits_for_a_while_and_the_load_goes_on() -> None:
    loader = Loader()
    gate = loader.gates["a"] = threading.Event()
    models = pool(loader, "a", "b", wait=0.02)
    with pytest.raises(UnavailableError, match=r"^the model is being loaded: a$") as caught:
        await use(models, "a")
    assert caught.value.retry_after == 5
    # The load may not have begun by then.
    await until(lambda: models.entry("a").progress > 0)
    assert (models.entry("a").state, models.entry("a").progress, models.entry("a").users) == ("loading", 0.5, 0)
    gate.set()
    await until(lambda: models.entry("a").state == "loaded")
    await use(models, "a")
    assert loader.log == ["load a"]


async def test_a_heartbeat_instead_of_an_error() -> None:
    loader = Loader()
    gate = loader.gates["a"] = threading.Event()
    models = pool(loader, "a", "b", wait=0.02)
    beats = 0

    async def heartbeat() -> float:
        nonlocal beats
        beats += 1
        if beats == 3:
            gate.set()
        return 0.01

    async with models.lease(models.entry("a"), heartbeat):
        assert beats >= 3 and models.entry("a").users == 1
    assert models.entry("a").users == 0
    async with models.lease(models.entry("a"), heartbeat):
        pass
    assert loader.log == ["load a"]


async def test_a_heartbeat_that_fails_ends_the_wait() -> None:
    loader = Loader()
    gate = loader.gates["a"] = threading.Event()
    models = pool(loader, "a", "b", wait=0.01)

    async def heartbeat() -> float:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        async with models.lease(models.entry("a"), heartbeat):
            pass
    assert models.entry("a").users == 0
    gate.set()
    await until(lambda: models.entry("a").state == "loaded")


async def test_who_waits_for_a_load_is_refused_when_the_server_drains() -> None:
    loader = Loader()
    gate = loader.gates["a"] = threading.Event()
    models = pool(loader, "a", "b")
    waiting = asyncio.create_task(use(models, "a"))
    await until(lambda: models.entry("a").state == "loading")
    models.drain()
    with pytest.raises(UnavailableError) as caught:
        await waiting
    assert caught.value.code == "draining" and models.entry("a").users == 0
    gate.set()
    await until(lambda: models.entry("a").state == "loaded")


async def test_a_failed_load_is_an_error_for_all_who_wait() -> None:
    loader = Loader()
    loader.errors["a"] = ModelError("a.gguf: is damaged")
    models = pool(loader, "a", "b")
    results = await asyncio.gather(*(use(models, "a") for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["a.gguf: is damaged"] * 3
    assert models.entry("a").state == "unloaded"
    del loader.errors["a"]
    await use(models, "a")


async def test_a_ttl_unloads_what_nobody_uses() -> None:
    loader = Loader()
    models = pool(loader, "a", "b", ttl=0.05)
    async with models.lease(models.entry("a")):
        await asyncio.sleep(0.1)
        assert loader.log == ["load a"]
        await use(models, "a")
    # In use again when its time is over.
    async with models.lease(models.entry("a")):
        await asyncio.sleep(0.1)
        assert models.entry("a").state == "loaded"
    await until(lambda: models.entry("a").state == "unloaded")
    assert loader.log == ["load a", "close a"]


async def test_load_and_unload() -> None:
    loader = Loader()
    models = pool(loader, "a", "b")
    await models.load(models.entry("b"))
    await models.load(models.entry("b"))
    assert [entry.name for entry in models.loaded()] == ["b"]
    await models.unload(models.entry("b"))
    await models.unload(models.entry("b"))
    assert loader.log == ["load b", "close b"]


async def test_a_model_is_loaded_anew_behind_its_requests_also_a_pinned_one() -> None:
    loader = Loader()
    models = pool(loader, "a", pinned=("a",))
    async with models.lease(models.entry("a")) as before:
        reloading = asyncio.ensure_future(models.reload(models.entry("a")))
        await until(lambda: models.entry("a").state == "unloading")
        # Who comes meanwhile gets the new one.
        waiting = asyncio.ensure_future(use(models, "a"))
        await asyncio.sleep(0)
        assert not cast(Any, before).closed
    await asyncio.gather(reloading, waiting)
    assert loader.log == ["load a", "close a", "load a"]
    loader.errors["a"] = ModelError("gone")
    with pytest.raises(ModelError, match=r"^gone$"):
        await models.reload(models.entry("a"))
    # One that is not loaded, as it could not be, is loaded.
    loader.errors.clear()
    await models.reload(models.entry("a"))
    assert loader.log[3:] == ["close a", "load a"]


async def test_requests_are_refused_until_the_start_is_over() -> None:
    models = pool(Loader(), "a", "b")
    models.starting = True
    with pytest.raises(UnavailableError, match=r"^the model is being loaded$"):
        await use(models, "a")


async def test_clients_that_leave_while_they_wait() -> None:
    loader = Loader()
    gate = loader.gates["b"] = threading.Event()
    models = pool(loader, "a", "b", max_loaded=1)
    tasks = [asyncio.create_task(use(models, "b")) for _ in range(3)]
    await until(lambda: models.entry("b").users == 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    gate.set()
    await until(lambda: models.entry("b").state == "loaded")
    assert models.entry("b").users == 0
    await use(models, "a")
    assert loader.log == ["load b", "close b", "load a"]


async def test_the_close_closes_all() -> None:
    loader = Loader()
    models = pool(loader, "a", "b")
    for name in "ab":
        await use(models, name)
    await models.close()
    assert sorted(loader.log) == ["close a", "close b", "load a", "load b"]


@pytest.mark.parametrize("seed", range(5))
async def test_many_clients_and_little_room(seed: int) -> None:
    chance = random.Random(seed)
    loader = Loader(memory=10, a=6, b=6, c=3)
    models = pool(loader, "a", "b", "c", wait=30)
    served = itertools.count()

    async def client() -> None:
        for _ in range(30):
            name = chance.choice("abc")
            async with models.lease(models.entry(name)) as model:
                assert cast(Any, model).name == name
                await asyncio.sleep(chance.random() / 1000)
                assert not cast(Any, model).closed
            next(served)

    await asyncio.gather(*(client() for _ in range(8)))
    assert next(served) == 240
    assert len(loader.log) > 20 and loader.held <= 10
    assert all(entry.users == 0 for entry in models.entries)


async def test_a_reload_keeps_what_is_as_before() -> None:
    loader = Loader()
    models = pool(loader, "a", "b", "c")
    for name in "ab":
        await use(models, name)
    kept = models.entry("a")
    made = pool(loader, "a", "d", "b", pinned=("b", "d"))
    async with models.lease(models.entry("b")) as model:
        models.update(made.entries)
        assert models.entry("a") is kept and [entry.name for entry in models.entries] == ["a", "d", "b"]
        with pytest.raises(NotFoundError):
            models.entry("c")
        await asyncio.sleep(0.02)
        # A pinned model is another one than before; its requests end first.
        assert not cast(Any, model).closed
    await until(lambda: all(models.entry(name).state == "loaded" for name in "db"))
    assert loader.log == ["load a", "load b", "close b", "load d", "load b"]
    await use(models, "a")
    assert loader.log.count("load a") == 1


async def test_models_that_a_reload_drops_count_until_they_are_gone() -> None:
    loader = Loader()
    models = pool(loader, "a", "b", max_loaded=1)
    async with models.lease(models.entry("a")):
        models.update(pool(loader, "b", "c").entries)
        task = asyncio.create_task(use(models, "b"))
        await asyncio.sleep(0.02)
        assert loader.log == ["load a"]
    await task
    assert loader.log == ["load a", "close a", "load b"]
    await models.close()
