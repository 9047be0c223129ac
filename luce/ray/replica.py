"""A replica: an actor of Serve with `luce serve` as its child.

It passes requests to the child and bytes of replies back, unchanged, and tells the ingress what the child has cached.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import aiohttp
from ray import serve
from yarl import URL

from luce.cluster.identity import new_key_pair
from luce.errors import ServerError
from luce.kvcache.block_log import BlockLog
from luce.ray.actor_guard import guard_this_actor
from luce.ray.child_server import ChildServer
from luce.ray.cluster_config import parse_config
from luce.ray.group_keys import GroupKeys
from luce.ray.leasing import acquire_devices, node_address
from luce.ray.process_guard import Nursery, end_now
from luce.ray.relayed_stream import RELAYING
from luce.ray.shard_host import start_shards
from luce.server.stream_frames import RECORD_HEADER, RELAY_HEADER

_START_SECONDS = 600.0
_HEALTH_SECONDS = 4.0
#: share of the newest reply in the mean of their seconds
_NEWEST = 0.2
#: headers of one connection, and those that are written anew
HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_CREDENTIALS = frozenset({"authorization", "x-api-key", "api-key"})

Json = dict[str, Any]


class Replica:
    """The deployment. `content`: the configuration, as of a TOML file."""

    async def __init__(self, content: Mapping[str, Any]) -> None:  # type: ignore[misc]
        config = parse_config(content)
        guard_this_actor(config)
        self._resumes = config.resume > 0
        self._groups = GroupKeys()
        self._log = BlockLog()
        #: life and number up to which the child's cache is known
        self._child_at = "", -1
        #: the ingresses ask at the same time, and what the child answers is noted in its order
        self._asking = asyncio.Lock()
        self._reply_seconds = 0.0
        self._luce = ""
        devices = await asyncio.to_thread(acquire_devices, config.replica.devices)
        # A pair for this life: its shards and its child have it, and nobody else.
        key = new_key_pair() if config.replica.shards else b""
        devices += await asyncio.to_thread(start_shards, config, key, end_now)
        self._devices, self._node = devices, await asyncio.to_thread(node_address)
        self._child = ChildServer(Nursery(), config, devices, _child_ended, key)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        )
        self._url = await asyncio.to_thread(self._child.url, _START_SECONDS)
        await self._until_healthy()

    async def _until_healthy(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if await self._health() == "":
                return
            await asyncio.sleep(0.1)
        raise ServerError(f"luce serve is not ready after {_START_SECONDS:g} s")

    async def _health(self) -> str:
        """What is wrong with the child, "" for nothing."""
        if not self._child.runs():
            return "luce serve has ended"
        try:
            async with asyncio.timeout(_HEALTH_SECONDS), self._session.get(f"{self._url}/health") as response:
                self._luce = response.headers.get("Server", "").removeprefix("luce/")
                return "" if response.status == 200 else await response.text()
        except (TimeoutError, aiohttp.ClientError) as error:
            return f"luce serve does not answer: {error}"

    async def check_health(self) -> None:
        """Serve asks this, and replaces the replica if it raises."""
        if why := await self._health():
            raise ServerError(why)

    async def forward(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        record: bytes = b"",
        **routing: Any,
    ) -> AsyncIterator[bytes]:
        """The child's response: first JSON with `status` and `headers`, then its bytes, in frames if it is a stream.
        `path`: as raw_target has it. `record`: of a stream that goes on here. `routing` is the router's, but for `salt`
        and `plain`: the salt of the client's group, and the keys of the prompt's blocks without it."""
        if plain := routing.get("plain"):
            self._note(self._groups.sent(plain, routing["salt"]), ())
        began = time.monotonic()
        async with self._session.request(
            method,
            URL(self._url + path, encoded=True),
            headers=self._headers(headers, record),
            data=body + record,
            allow_redirects=False,
        ) as response:
            kept = [(name, value) for name, value in response.headers.items() if name.lower() not in HOP_BY_HOP]
            yield json.dumps({"status": response.status, "headers": kept}).encode()
            async for chunk in response.content.iter_any():
                yield chunk
        if plain:
            seconds = time.monotonic() - began
            self._reply_seconds += (seconds - self._reply_seconds) * (_NEWEST if self._reply_seconds else 1.0)

    def _headers(self, headers: Sequence[tuple[str, str]], record: bytes) -> list[tuple[str, str]]:
        """Those of a client for the child, where it has no key of its own with the child's."""
        taken = HOP_BY_HOP | RELAYING | (_CREDENTIALS if self._child.client else frozenset())
        found = [(name, value) for name, value in headers if name.lower() not in taken]
        if self._resumes:
            found += [(RELAY_HEADER, self._child.admin), *([(RECORD_HEADER, str(len(record)))] if record else [])]
        return [*found, ("Authorization", f"Bearer {self._child.client}")] if self._child.client else found

    async def prompt_keys(self, path: str, body: bytes, **routing: Any) -> list[bytes]:
        """The keys of the blocks of a prompt, from the body that the endpoint `path` gets; none if the child refuses
        the body, as it will say when it gets it."""
        answer = await self._ask("POST", "/v1/cache/keys", {"path": path}, body)
        return [bytes.fromhex(key) for key in answer.get("keys", ())]

    async def report(self, target: str, life: str, after: int) -> Json | None:
        """What has changed of the reported keys since number `after` of a life, for RoutingState.apply; None from
        another replica than the one that is meant."""
        if serve.get_replica_context().replica_id.unique_id != target:
            return None
        async with self._asking:
            child_life, number = self._child_at
            answer = await self._ask("GET", "/v1/cache/blocks", {"life": child_life, "after": str(number)})
            if "since" not in answer:
                raise ServerError(f"luce serve does not tell what it has cached: {answer}")
            if answer["since"] < 0:
                self._note((), self._groups.clear())
            blocks = ([bytes.fromhex(key) for key in answer[name]] for name in ("added", "removed"))
            self._note(*self._groups.changed(*blocks))
            self._child_at = answer["life"], answer["sequence"]
        facts = {name: answer[name] for name in ("running", "waiting", "parallel", "prefill_seconds")}
        changes = dataclasses.asdict(self._log.changes(life, after))
        return {**changes, **facts, "reply_seconds": self._reply_seconds}

    async def describe(self, target: str) -> Json | None:
        """What `luce ray status` shows of this replica beside its load; None from another one than is meant. Raises
        ServerError if the child does not answer."""
        if serve.get_replica_context().replica_id.unique_id != target:
            return None
        await self.check_health()
        return {"node": self._node, "devices": self._devices, "luce": self._luce}

    def _note(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        for key in removed:
            self._log.note(key, held=False)
        for key in added:
            self._log.note(key, held=True)

    async def _ask(self, method: str, path: str, query: Mapping[str, str], body: bytes | None = None) -> Json:
        headers = {"Authorization": f"Bearer {self._child.admin}", "Content-Type": "application/json"}
        async with self._session.request(method, self._url + path, params=query, data=body, headers=headers) as reply:
            return dict(await reply.json(content_type=None))

    async def __del__(self) -> None:
        """Serve calls this behind the last request."""
        if hasattr(self, "_child"):
            await asyncio.to_thread(self._child.close)
        if hasattr(self, "_session"):
            await self._session.close()


def _child_ended(status: int) -> None:
    """A replica without its child is none: Serve starts the next one."""
    end_now(f"luce serve has ended with status {status}; so does its replica")
