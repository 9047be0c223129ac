"""The child process that renders one chat template; started by luce.text.template_child.

A template comes with a model from the internet. Jinja's sandbox protects Python's internals, but does not prevent
nested `range` loops, `10 ** 10 ** 10`, `'a' * 10 ** 10`, `'%99999999999d' % 1` or a filter that doubles a string, and a
thread that runs such code can neither be stopped nor does it release the interpreter lock. So the operating system
sets the limits: an alarm whose default action ends the process, even within one long C call, and a bound on the
address space, which turns results that are too large into MemoryError.

Lines, as luce.text.template_message packs them.
Lines in:   {"source": str, "seconds": float}                                    first, once
            {"variables": {...}, "now": ISO time, "seconds": float}
Lines out:  {"text": str}, text "" for the first line, or {"error": str}
End of input ends the process.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.parser import Parser

from luce.ipc.parent import die_with_parent
from luce.text.template_message import pack, unpack

_MEMORY = 512 << 20
_MEMORY_PER_BYTE = 32
_CHARACTERS = 1 << 20
_CHARACTERS_PER_BYTE = 8
_LONGEST_MESSAGE = 1000


class _Generation(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the reply for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, it escapes no HTML and keeps the order of keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _render(template: jinja2.Template, request: dict[str, Any], limit: int) -> str:
    now = datetime.datetime.fromisoformat(request["now"])
    pieces, size = [], 0
    for piece in template.generate({**request["variables"], "strftime_now": now.strftime}):
        size += len(piece)
        if size > limit:
            _raise(f"the result is longer than {limit} characters")
        pieces.append(piece)
    return "".join(pieces)


def _describe(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        text = f"line {error.lineno}: {error.message}"
    elif isinstance(error, jinja2.TemplateError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text[:_LONGEST_MESSAGE].split())


def _limit_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _MEMORY + _MEMORY_PER_BYTE * size
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def main(parent: int) -> None:
    """Respond to lines until the input ends, or the process `parent`."""
    die_with_parent(parent)
    environment = _environment()
    template: jinja2.Template | None = None
    for line in sys.stdin.buffer:
        _limit_memory(len(line))
        try:
            request = unpack(line)
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            if template is None:
                template = environment.from_string(request["source"])
                reply = {"text": ""}
            else:
                reply = {"text": _render(template, request, _CHARACTERS + _CHARACTERS_PER_BYTE * len(line))}
            encoded = pack(reply)
        except Exception as error:
            # Every exception of a template becomes a response: nothing else runs in this process.
            encoded = pack({"error": _describe(error)})
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(encoded)
        sys.stdout.buffer.flush()
