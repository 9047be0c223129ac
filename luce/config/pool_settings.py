"""Settings of a server that has several models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from luce.config.field import SamplingDefaults, setting
from luce.config.values import integer, number, path, text


@dataclass(frozen=True)
class PoolSettings(SamplingDefaults):
    """A part of luce.config.settings.Config."""

    strict_model: bool = setting(False, text, "answer 404 to requests that name another model", group="server")
    models_dir: Path | None = setting(
        None,
        path,
        "directory whose GGUF files are served too, each by its name: the `model` of a request picks one, which is "
        "loaded then",
        metavar="DIR",
        group="server",
    )
    max_loaded_models: int = setting(
        0,
        integer(0, 1000),
        "most models that are loaded at a time (0: as many as fit); the least recently used one makes room",
        metavar="N",
        group="server",
    )
    load_wait: float = setting(
        30.0,
        number(0, 3600),
        "time that a request waits for its model to be loaded, before it gets 503, or a stream its first comment",
        metavar="SECONDS",
        group="server",
    )
