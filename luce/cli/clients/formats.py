"""Formats of configuration files, changed in place: comments, order and all other settings stay.

`Format.edit(text, changes)` gives the new text. It is held to what its own parser reads: the old data with the changes,
and nothing else. Raises FormatProblem where that cannot be had.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

Json = dict[str, Any]

_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)")
#: a value that shells, Docker and python-dotenv read alike
_PLAIN = re.compile(r"[\w./:@%+,=~-]*")
#: the key that tells items of a list of objects apart
_IDENTITY = "model_id"


class FormatProblem(Exception):
    """A text that cannot be read, or not changed in place."""


@dataclass(frozen=True)
class Format:
    """How texts are read, what the data are with changes, and how the changes get into a text."""

    parse: Callable[[str], Any]
    merge: Callable[[Any, Json], Any]
    insert: Callable[[str, Json], str]

    def edit(self, text: str, changes: Json) -> str:
        """A text with the changes; the same text if it has them."""
        data = self._read(text)
        wanted = self.merge(data, changes)
        if data == wanted:
            return text
        try:
            new = self.insert(text, changes)
            right = self.parse(new) == wanted
        except (ValueError, yaml.YAMLError):
            right = False
        if not right:
            raise FormatProblem("its form does not allow to change it in place")
        return new

    def _read(self, text: str) -> Any:
        try:
            return self.parse(text)
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise FormatProblem(f"cannot be parsed ({' '.join(str(error).split())})") from None


def merged(data: Any, changes: Json) -> Json:
    """An object with these members; objects inside are merged too."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise FormatProblem("is not an object")
    result = dict(data)
    for name, value in changes.items():
        inside = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if inside else value
    return result


# --- JSON


def _parse_json(text: str) -> Any:
    return json.loads(text) if text.strip() else None


def _insert_json(text: str, changes: Json) -> str:
    first = re.search(r"\n([ \t]+)", text)
    return json.dumps(merged(_parse_json(text), changes), indent=first[1] if first else 2, ensure_ascii=False) + "\n"


# --- TOML


def _lines(text: str) -> list[str]:
    """Unlike str.splitlines, it leaves characters in values alone that only Unicode counts as ends of lines."""
    return text.removesuffix("\n").split("\n") if text else []


def _insert_toml(text: str, changes: Json) -> str:
    lines = _lines(text)
    for header, values in _tables(changes, ""):
        start = _header(lines, header)
        if start is None:
            lines += ([""] if lines else []) + [f"[{header}]"]
            start = len(lines)
        for name, value in values.items():
            _set_line(lines, start, name, f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _tables(changes: Json, header: str) -> Iterator[tuple[str, Json]]:
    """Headers and plain values of a table and of those in it."""
    values = {name: value for name, value in changes.items() if not isinstance(value, dict)}
    if values or not changes:
        yield header, values
    for name, value in changes.items():
        if isinstance(value, dict):
            yield from _tables(value, f"{header}.{name}" if header else name)


def _header(lines: list[str], header: str) -> int | None:
    """The index behind the line of a table's header."""
    if not header:
        return 0
    found = (i for i, line in enumerate(lines) if re.fullmatch(rf"\s*\[{re.escape(header)}\]\s*(#.*)?", line))
    return next((i + 1 for i in found), None)


def _set_line(lines: list[str], start: int, name: str, line: str) -> None:
    """Replace the line of a key in the table that begins at `start`, or put it behind the table's last one."""
    end = next((i for i in range(start, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
    for i in range(start, end):
        if re.match(rf"\s*{re.escape(name)}\s*=", lines[i]):
            lines[i] = line
            return
    while end > start and not lines[end - 1].strip():
        end -= 1
    lines.insert(end, line)
    if end + 1 < len(lines) and lines[end + 1].strip():
        lines.insert(end + 1, "")


# --- YAML: a list of objects that `_IDENTITY` tells apart


def _merge_items(data: Any, changes: Json) -> list[Any]:
    items = [] if data is None else data
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise FormatProblem("is not a list of objects")
    same = [item.get(_IDENTITY) == changes[_IDENTITY] for item in items]
    changed = [merged(item, changes) if known else item for item, known in zip(items, same, strict=True)]
    return changed if any(same) else [*changed, changes]


def _insert_item(text: str, changes: Json) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    items = root.value if isinstance(root, yaml.SequenceNode) else []
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in changes.items()]
    for item in items:
        nodes = {key.value: value for key, value in item.value}
        if nodes[_IDENTITY].value == changes[_IDENTITY]:
            return _changed_item(text, item, nodes, changes)
    start = "" if not text or text.endswith("\n") else "\n"
    indent = " " * root.start_mark.column if items else ""
    return text + start + f"{indent}- " + f"\n{indent}  ".join(lines) + "\n"


def _changed_item(text: str, item: yaml.MappingNode, nodes: Mapping[str, yaml.Node], changes: Json) -> str:
    """The text with changed values of an item; new keys stand before its first one."""
    edits = []
    for name, value in changes.items():
        new = json.dumps(value, ensure_ascii=False)
        if name in nodes:
            node = nodes[name]
            edits.append((node.start_mark.index, node.end_mark.index, new))
        else:
            at = item.start_mark
            edits.append((at.index, at.index, f"{name}: {new}\n{' ' * at.column}"))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


# --- variables


def _parse_variables(text: str) -> dict[str, str]:
    found = {}
    for number, line in enumerate(_lines(text), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            match = _VARIABLE.fullmatch(line.strip())
            if match is None:
                raise ValueError(f"line {number} is not NAME=VALUE")
            found[match[1]] = match[2]
    return found


def plain(value: str) -> bool:
    """Whether all programs read a variable of this value in the same way."""
    return _PLAIN.fullmatch(value) is not None


def _insert_variables(text: str, changes: Json) -> str:
    lines = _lines(text)
    for name, value in changes.items():
        if not plain(value):
            raise FormatProblem(f"{name}: programs read its value in different ways")
        at = next((i for i, line in enumerate(lines) if (m := _VARIABLE.match(line.strip())) and m[1] == name), None)
        if at is None:
            lines.append(f"{name}={value}")
        else:
            lines[at] = f"{name}={value}"
    return "\n".join(lines) + "\n"


JSON = Format(_parse_json, merged, _insert_json)
TOML = Format(tomllib.loads, merged, _insert_toml)
YAML = Format(yaml.safe_load, _merge_items, _insert_item)
VARIABLES = Format(_parse_variables, merged, _insert_variables)
