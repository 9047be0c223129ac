"""Asks Ray which placement groups find no place, and for how long."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group_table

from luce.ray.pending_groups import PendingGroups

#: seconds between two looks
_INTERVAL = 5.0
_log = logging.getLogger("ray.serve")


class GroupWatch:
    """Looks for groups that pend, on a thread, as long as the process runs."""

    def __init__(self) -> None:
        self._groups = PendingGroups()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="group-watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self.report()
            except Exception as error:
                # The head's store does not answer; the next look may be answered.
                _log.warning("no answer about placement groups: %s", error)
            time.sleep(_INTERVAL)

    def report(self) -> list[dict[str, Any]]:
        """As PendingGroups.report."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free = list(available_resources_per_node().values())
        with self._lock:
            return self._groups.report(placement_group_table(), nodes, free, time.monotonic())
