"""The cluster of `luce serve --cluster`: machines join, and the model is loaded on their devices too."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from luce import log
from luce.api import Model
from luce.assembly import open_model
from luce.cluster.admin import answering, join_command
from luce.cluster.coordinator import TOKEN_SECONDS, Coordinator
from luce.cluster.weight_source import WeightSource
from luce.config.settings import Config, flag
from luce.errors import LuceError, ServerError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf

_log = logging.getLogger("luce.cluster")
#: seconds in which the coordinator learns of a loss by which a load has failed
LOSS_SECONDS = 2.0


class ServedCluster:
    """Loads the server's model on its own devices and those of the members."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        #: lets the server load its model anew, without waiting for it; None before it is loaded for the first time
        self.reload: Callable[[], None] | None = None

    def replan(self) -> None:
        """Load the model anew, on the devices that are there now. Raises ServerError before it is loaded."""
        if self.reload is None:
            raise ServerError("the model is not loaded yet")
        self.reload()

    def open_model(
        self, path: Path, config: Config, progress: Callable[[float], None], on_wait: Callable[[str], None]
    ) -> Model:
        """The model, the first time once --cluster-min members are there or --cluster-wait is over.

        `on_wait` gets what the load waits for, and "" behind it. Raises as luce.assembly.open_model.
        """
        wanted = config.cluster_min

        def waiting(found: int) -> None:
            on_wait(f"waiting for members: {found} of {wanted}")

        # A new placement is that of the members that are there.
        patience = config.cluster_wait if self.reload is None else 0.0
        found = self._coordinator.wait_for_members(wanted, patience, waiting)
        on_wait("")
        if found < wanted:
            _log.warning(
                "%s %d: %d members are there; the model loads without more", flag("cluster_min"), wanted, found
            )
        without: frozenset[str] = frozenset()
        while True:
            try:
                return self._load(path, config, progress, without)
            except LuceError as error:
                unfit, lost = self._coordinator.broken(LOSS_SECONDS)
                without |= unfit
                if not unfit and not lost:
                    raise
                _log.warning("the load failed, and begins again without what is not there: %s", error)
                self._coordinator.wait_for_members(wanted, config.cluster_wait, waiting)
                on_wait("")

    def _load(self, path: Path, config: Config, progress: Callable[[float], None], without: Collection[str]) -> Model:
        """The model on the members that are there now, but not on those of `without`."""
        with open_gguf(path) as file:
            identity = fingerprint(file)
        source = WeightSource(path, config.cluster_stream_rate * 1e6, streams=config.cluster_stream == "on")
        devices, connects = self._coordinator.plan(identity, source, without)
        own = config.target_devices or (("auto",) if config.target_device == "auto" else (config.target_device,))
        model = open_model(path, dataclasses.replace(config, target_devices=(*own, *devices)), progress, connects)
        placed = {str(shard["device"]): shard["layers"] for shard in model.placement}
        self._coordinator.keep({device: range(at[0], at[1] + 1) for device, at in placed.items() if device in devices})
        return model


@contextlib.contextmanager
def served_cluster(config: Config) -> Iterator[ServedCluster | None]:
    """The cluster of the settings, None without --cluster; prints the command with which a machine joins."""
    if not config.cluster:
        yield None
        return
    with contextlib.closing(Coordinator(config.cluster, config.cluster_listen, flag("cluster_listen"))) as coordinator:
        log.event(_log, "cluster", cluster=config.cluster, address=",".join(coordinator.addresses))
        cluster = ServedCluster(coordinator)
        with answering(coordinator, cluster.replan):
            _print_command(coordinator)
            yield cluster


def _print_command(coordinator: Coordinator) -> None:
    """Print the command with which a machine joins, where nobody but this user keeps it."""
    # The journal keeps what it reads, and others may read it.
    if not log.is_journal(sys.stdout):
        with contextlib.suppress(OSError):
            print(join_command(coordinator, TOKEN_SECONDS), flush=True)
            return
    _log.info("`luce cluster token` prints the command with which a machine joins")
