"""Parsers of values from any origin. Each raises ValueError that names the expected form."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

Parser = Callable[[str], Any]


_INTEGER = re.compile(r"[ \t\n\r\f\v]*(-?[0-9]{1,20})", re.ASCII)


def integer(low: int, high: int = 2**31 - 1) -> Parser:
    """An integer in [low, high]: decimal digits, with at most white space and a minus sign before them."""

    def parse(text: str) -> int:
        match = _INTEGER.fullmatch(text)
        if match is None or not low <= int(match[1]) <= high:
            raise ValueError(f"expected an integer in {low}..{high}")
        return int(match[1])

    return parse


_TOKENS = re.compile(r"[ \t\n\r\f\v]*([0-9]{1,20})([kKmM]?)", re.ASCII)
_MULTIPLES = {"": 1, "k": 1 << 10, "m": 1 << 20}


def tokens(low: int, high: int = 2**31 - 1) -> Parser:
    """A number of tokens in [low, high]: an integer, or one with k (1024) or M (1024 * 1024) behind it."""

    def parse(text: str) -> int:
        match = _TOKENS.fullmatch(text)
        value = -1 if match is None else int(match[1]) * _MULTIPLES[match[2].lower()]
        if not low <= value <= high:
            raise ValueError(f"expected an integer in {low}..{high} (4k is 4096)")
        return value

    return parse


def number(low: float, high: float, *, above: bool = False) -> Parser:
    """A number in [low, high], or in (low, high] with `above`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value if above else low <= value) or not value <= high:
            raise ValueError(f"expected a number in {'(' if above else '['}{low:g}, {high:g}]")
        return value

    return parse


def ratio_or_mass(text: str) -> str:
    """A value of --prefill-keep: `ratio`, `session`, or `mass:SHARE` or `mass:SHARE:MOST` with shares in (0, 1]."""
    kind, *shares = text.split(":")
    if kind == "mass" and 0 < len(shares) <= 2:
        return ":".join([kind, *(str(number(0, 1, above=True)(share)) for share in shares)])
    if text not in ("ratio", "session"):
        raise ValueError("expected ratio, mass:SHARE, mass:SHARE:MOST or session")
    return text


_SUFFIXES = {"mib": 1, "gib": 1 << 10, "tib": 1 << 20}


def mebibytes(text: str) -> int:
    """`512`, `512MiB`, `4GiB`, `1TiB` as a number of MiB."""
    number, factor = text.lower(), 1
    for suffix, value in _SUFFIXES.items():
        if number.endswith(suffix):
            number, factor = number.removesuffix(suffix), value
    if not number.isascii() or not number.isdigit() or int(number) * factor > 1 << 40:
        raise ValueError("expected a size such as 512MiB or 4GiB")
    return int(number) * factor


def choice(*names: str) -> Parser:
    """One of these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError("expected " + " or ".join(names))
        return text

    return parse


def choices(*names: str) -> Parser:
    """Some of these names, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        parts = tuple(part.strip() for part in text.split(","))
        if not set(parts) <= set(names):
            raise ValueError("expected " + " or ".join(names) + ", separated by commas")
        return parts

    return parse


def text(text: str) -> str:
    """Any text."""
    return text


def http_url(text: str) -> str:
    """A URL of http or https, or nothing."""
    if text and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", text):
        raise ValueError("expected http://HOST[:PORT]/PATH or https://...")
    return text


def path_or_name(text: str) -> str:
    """A path, a name or nothing, unchanged."""
    user = text.partition("/")[0]
    if user.startswith("~") and os.path.expanduser(user) == user:
        raise ValueError(f"expected a path; there is no user {user}")
    return text


def path_or_mode(text: str) -> str:
    """`auto`, `off`, or a path, unchanged."""
    if not text:
        raise ValueError("expected a path, auto or off")
    return path_or_name(text)


def resident_tokens(text: str) -> str:
    """A value of --kvflash: `off`, a number of tokens, `auto`, `auto:N`; without the suffix of a number of tokens."""
    if text in ("off", "auto"):
        return text
    try:
        number = tokens(1, 10**20)(text.removeprefix("auto:"))
    except ValueError:
        raise ValueError("expected off, a number of tokens, auto or auto:N") from None
    return f"auto:{number}" if text.startswith("auto:") else str(number)


_LAYERS = re.compile(r"[1-9][0-9]{0,5}|[0-9]{1,6}-[0-9]{1,6}(,[0-9]{1,6}-[0-9]{1,6})*", re.ASCII)


def expert_layers(text: str) -> str:
    """A value of --experts-on: `device`, `cpu`, `auto`, a number of layers, or ranges of layers; unchanged."""
    ranges = [part.split("-") for part in text.split(",") if "-" in part]
    if text not in ("device", "cpu", "auto") and not _LAYERS.fullmatch(text):
        raise ValueError("expected device, cpu, auto, a number of layers, or ranges of layers such as 20-39")
    for first, last in ranges:
        if int(first) > int(last):
            raise ValueError(f"{first}-{last}: the first layer comes before the last one")
    return text


def path(text: str) -> Path:
    """A path; a leading ~ is the user's home directory."""
    if not text:
        raise ValueError("expected a path")
    return Path(path_or_name(text)).expanduser()


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ValueError("expected names separated by commas, none of them empty")
    return parts


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/]+", re.ASCII)


def origins(text: str) -> tuple[str, ...]:
    """Origins as browsers send them, or `*`, separated by commas."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(map(_ORIGIN.fullmatch, parts)):
        raise ValueError("expected * or origins such as https://example.com:8443, without a path, separated by commas")
    return parts


#: efforts of reasoning from the least to the most, in OpenAI's spelling
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
#: efforts in the spellings of others
EFFORT_SPELLINGS = {"x-high": "xhigh", "extra_high": "xhigh"}


def efforts(text: str) -> tuple[tuple[str, int], ...]:
    """Efforts with their budgets, `name=N` separated by commas. Of two values for a name the last one counts."""
    expected = f"expected name=N[,name=N...] with {', '.join(EFFORTS)}"
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        name = EFFORT_SPELLINGS.get(name, name)
        if name not in EFFORTS:
            raise ValueError(expected)
        found[name] = tokens(0)(count)
    ordered = [(name, found[name]) for name in EFFORTS if name in found]
    for (less, low), (more, high) in pairwise(ordered):
        if low > high:
            raise ValueError(f"{more} has fewer tokens than {less}")
    return tuple(ordered)


_DEVICE = re.compile(
    r"(?:auto|sim|(?:tcp://[^/,\s]+:(?P<port>[1-9][0-9]*)/)?(?:cuda|hip|cpu))(?::(?P<index>0|[1-9][0-9]*))?", re.ASCII
)
_LAST_INDEX, _LAST_PORT = 2**31 - 1, 2**16 - 1


def _device(text: str) -> str | None:
    """A device with its index, which is 0 where none is given; None if the text names no device."""
    match = _DEVICE.fullmatch(text)
    if match is None or int(match["index"] or 0) > _LAST_INDEX or int(match["port"] or 1) > _LAST_PORT:
        return None
    return text if match["index"] or text == "auto" else f"{text}:0"


def device(text: str) -> str:
    """One device, as luce.runtime.open and luce.remote.open read it."""
    found = _device(text)
    if found is None:
        raise ValueError("expected auto or backend:index (auto:N, cuda:N, hip:N, cpu:N)")
    return found


def devices(text: str) -> tuple[str, ...]:
    """Devices separated by commas."""
    parts = [_device(part) for part in text.split(",")]
    found = tuple(part for part in parts if part is not None)
    if len(found) < len(parts):
        raise ValueError(
            "expected backend:index[,backend:index...] (auto:N, cuda:N, hip:N, cpu:N), or auto for all GPUs"
        )
    return found


def interpreters(text: str) -> tuple[tuple[str, Path], ...]:
    """A path for all backends, as kind "", or a path for each named backend."""
    if "=" not in text:
        return (("", path(text)),)
    parts = [part.partition("=") for part in text.split(",")]
    kinds = [kind for kind, _, _ in parts]
    if not set(kinds) <= {"cuda", "hip", "cpu"} or len(set(kinds)) < len(kinds) or not all(p for _, _, p in parts):
        raise ValueError("expected a path, or backend=PATH[,backend=PATH...] with cuda, hip or cpu")
    return tuple((kind, path(where)) for kind, _, where in parts)


_VARIABLE = re.compile(r"(cuda|hip|cpu):([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.ASCII | re.DOTALL)


def variables(text: str) -> tuple[str, ...]:
    """Environment variables of daemons: `backend:NAME=VALUE`, separated by commas."""
    # A repeated flag arrives joined by commas, but values may contain commas too.
    parts = re.split(r",(?=[a-z]+:[A-Za-z0-9_]+=)", text)
    if not all(map(_VARIABLE.fullmatch, parts)):
        raise ValueError("expected backend:NAME=VALUE with cuda, hip or cpu")
    return tuple(parts)


def margins(text: str) -> tuple[tuple[str, int], ...]:
    """`SIZE` for all devices, as device "", and `DEVICE=SIZE`, separated by commas; in bytes. A later one replaces an
    earlier one."""
    found = {}
    for part in text.split(","):
        name, equals, size = part.rpartition("=")
        device_or_all = _device(name) if equals else ""
        if device_or_all is None:
            raise ValueError("expected SIZE or DEVICE=SIZE, such as 2GiB or cuda:0=2GiB")
        found[device_or_all] = mebibytes(size) << 20
    return tuple(found.items())


_WEIGHT = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|\.[0-9]+([eE][+-]?[0-9]+)?", re.ASCII)


def weights(text: str) -> tuple[float, ...]:
    """Positive numbers separated by commas."""
    parts = text.split(",")
    values = tuple(float(part) if _WEIGHT.fullmatch(part) else 0.0 for part in parts)
    if not all(0 < value < math.inf for value in values):
        raise ValueError("expected positive finite numbers separated by commas")
    return values


def shares(text: str) -> tuple[tuple[int, float], ...]:
    """Shares in (0, 1] by numbers of tokens, `N:SHARE` separated by commas, in ascending order of N."""
    found: dict[int, float] = {}
    for part in text.split(","):
        count, colon, share = part.strip().partition(":")
        if not colon:
            raise ValueError("expected N:SHARE[,N:SHARE...], such as 32k:0.1,128k:0.02")
        at = tokens(0)(count)
        if at in found:
            raise ValueError(f"{count} is named twice")
        found[at] = number(0, 1, above=True)(share)
    return tuple(sorted(found.items()))
