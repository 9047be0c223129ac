"""The sampling values that a model file recommends, for settings that nobody has set.

Keys: `general.sampling.*` of the GGUF format (Keys.General in gguf-py's constants.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from luce.config.sampling import SAMPLERS
from luce.config.settings import Config
from luce.gguf.metadata import Metadata

_log = logging.getLogger(__name__)

_PREFIX = "general.sampling."
#: keys that change the distribution where they are not 0, and that no setting of Luce stands for
_LACKING = ("sequence", "xtc_probability", "mirostat", "penalty_last_n")


def checked(name: str, value: object, origin: str) -> float | None:
    """A recommended value of a sampler, if it is in the range of requests; else None, and the log names `origin`."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("expected a number")
        # Files have float32 values: 0.95 is 0.949999988 there.
        found: float = SAMPLERS[name].parse(f"{value:.7g}" if isinstance(value, float) else str(value))
    except ValueError as error:
        _log.warning("%s is left out: %s, got %r", origin, error, value)
        return None
    return found


def file_sampling(metadata: Metadata) -> dict[str, float]:
    """The values of a file by the names of SAMPLERS. Those outside their range, and those of samplers that Luce lacks,
    are left out, which the log says."""
    found = {}
    for name, sampler in SAMPLERS.items():
        key = _PREFIX + sampler.file_key
        if not sampler.file_key or key not in metadata:
            continue
        number = checked(name, metadata[key], f"{metadata.path}: {key}")
        if number is not None:
            found[name] = number
    if lacking := [_PREFIX + key for key in _LACKING if metadata.get(_PREFIX + key)]:
        _log.warning("%s: Luce has no setting for %s", metadata.path, ", ".join(lacking))
    return found


def with_sampling(config: Config, recommended: Mapping[str, float]) -> Config:
    """The settings, with recommended values in the place of those that nobody has set."""
    unset: dict[str, Any] = {name: value for name, value in recommended.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **unset)
