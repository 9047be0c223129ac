"""Fields of the table of settings: each made by `setting`, or from a row of the table of sampling values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from luce.config.sampling import SAMPLERS
from luce.config.values import Parser


def setting(default: Any, parse: Parser, help: str, *, flags: Sequence[str] = (), metavar: str = "", group: str) -> Any:
    """A field. `flags` are aliases without dashes; a tuple default means that the flag may be repeated."""
    meta = {"parse": parse, "help": help, "flags": tuple(flags), "metavar": metavar, "group": group}
    return dataclasses.field(default=default, metadata=meta)


if TYPE_CHECKING:

    class SamplingDefaults:
        """Settings with the defaults of sampling values; code reads them by the names of SAMPLERS. None: nobody set
        them."""

else:
    SamplingDefaults = dataclasses.make_dataclass(
        "SamplingDefaults",
        [
            (
                name,
                sampler.kind | None,
                setting(
                    None,
                    sampler.parse,
                    f"{sampler.help}; used when a request does not set it (default: what the model's makers recommend, "
                    f"else {sampler.setting:g})",
                    flags=[*(alias.replace("_", "-") for alias in sampler.aliases[:1]), *sampler.flags],
                    metavar=sampler.metavar,
                    group="sampling",
                ),
            )
            for name, sampler in SAMPLERS.items()
            if sampler.setting is not None
        ],
        frozen=True,
    )
