"""How large the prefix cache in host memory may be."""

from __future__ import annotations

from luce.config.settings import Config, flag
from luce.errors import UsageError
from luce.runtime.host import host_memory


def check_cache_ram(config: Config) -> None:
    """Raises UsageError if --cache-ram exceeds this machine's memory: the cache would grow until the system kills a
    process."""
    total = host_memory().total >> 20
    other_machine = any("/" in device for device in (*config.target_devices, config.target_device))
    if config.cache_ram > max(total, Config.cache_ram) and not other_machine:
        raise UsageError(
            f"{flag('cache_ram')} {config.cache_ram}: this machine has {total} MiB of memory", param="cache_ram"
        )
