"""A shard of a replica: an actor with `luce shard` as its child, and the replica's side of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from luce.config.environment import child_environment
from luce.errors import ServerError
from luce.ipc.lease import renew
from luce.ray.actor_guard import guard_this_actor
from luce.ray.cluster_config import ClusterConfig, parse_config, plain_content
from luce.ray.leasing import acquire_devices, node_address
from luce.ray.private_folder import private_folder
from luce.ray.process_guard import Nursery, end_now

_LISTENING = re.compile(r"listening on (\S+)\n")
_START_SECONDS = 120.0


class ShardHost:
    """The actor. `key`: the pair of the replica's present life, PEM."""

    def __init__(self, content: Mapping[str, Any], kind: str, key: bytes) -> None:
        config = parse_config(content)
        guard_this_actor(config)
        (self._device,) = acquire_devices((kind,))
        # Gone once the child has read it.
        folder = private_folder()
        try:
            path = folder / "key.pem"
            path.touch(0o600)
            path.write_bytes(key)
            self._start(config, config.luce_python[kind], path)
        finally:
            shutil.rmtree(folder)

    def _start(self, config: ClusterConfig, python: str, key_file: Path) -> None:
        reader, writer = os.pipe()
        command = [python, "-P", "-m", "luce", "shard", config.model, "--key-file", str(key_file)]
        command += ["--listen", f"{node_address()}:0", "--lease", str(reader)]
        self._child = Nursery().start(command, child_environment({}), output=subprocess.PIPE, pass_fds=[reader])
        os.close(reader)
        renew(writer)
        address, known = list[str](), threading.Event()

        def read() -> None:
            assert self._child.stdout is not None
            with self._child.stdout as lines:
                for line in lines:
                    text = line.decode(errors="replace")
                    os.write(2, line)
                    if not known.is_set() and (found := _LISTENING.search(text)):
                        address.append(found[1])
                        known.set()
            status = self._child.wait()
            known.set()
            if address:
                end_now(f"luce shard has ended with status {status}; so does its actor")

        threading.Thread(target=read, name="child-log", daemon=True).start()
        if not known.wait(_START_SECONDS) or not address:
            raise ServerError("luce shard does not start")
        self._address = address[0]

    def name(self) -> str:
        """The device as --target-devices has it."""
        return f"tcp://{self._address}/{self._device}"

    def alive(self) -> None:
        """Never returns: who waits for it learns of this actor's end."""
        threading.Event().wait()


def start_shards(config: ClusterConfig, key: bytes, on_loss: Callable[[str], None]) -> Sequence[str]:
    """Start a shard in each further bundle of this actor's placement group; returns their devices.

    `on_loss` is called, on a thread, when one of them ends. They end with the actor that calls this.
    """
    group = ray.util.get_current_placement_group()
    assert group is not None
    actors = []
    for number, kind in enumerate(config.replica.shards, 1):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        options = {"num_cpus": 0, "resources": {f"luce_{kind}": 1}, "max_concurrency": 2}
        made = ray.remote(ShardHost).options(scheduling_strategy=place, **options)
        actors.append(made.remote(plain_content(config), kind, key))
    names = ray.get([actor.name.remote() for actor in actors])
    ends = [actor.alive.remote() for actor in actors]

    def wait() -> None:
        try:
            ray.get(ray.wait(ends)[0])
        except RayError as error:
            on_loss(f"a shard is lost: {str(error).splitlines()[0]}")

    if actors:
        threading.Thread(target=wait, name="shard-watch", daemon=True).start()
    return [str(name) for name in names]
