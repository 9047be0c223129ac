"""Processes of chat templates that serve one model after another, for tests of what models compute: a pytest plugin.

The process of a template (luce.text.template_child) takes 70 ms of CPU until it renders, and tests/golden opens 1400
models. A process keeps nothing from one render to the next, so one that is no longer needed waits for the next model
with its template. Whether the template writes calls that are read back, which takes a quarter of a small model's load,
is looked at once for each template. Tests of the process itself, or of what a model leaves behind, have real ones.
"""

from __future__ import annotations

import functools
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import luce.text.open
from luce.text import template
from luce.text.call_check import call_mismatch
from luce.text.chat import ChatFormat
from luce.text.template_child import TemplateChild
from luce.text.template_message import pack, unpack

#: folders and files whose tests open many models, and files there that count processes, threads or descriptors
PLACES = ("golden", "test_cli_inspect_published", "test_cli_plan", "test_draft_open", "test_draft_sizes")
COUNTING = ("test_split_requests",)
#: processes that wait
MOST = 24


class Waiting:
    """The processes that wait, by their template."""

    def __init__(self) -> None:
        self._children: dict[str, TemplateChild] = {}
        self._most = MOST

    def take(self, source: str) -> TemplateChild | None:
        """A process that has the template."""
        child = self._children.pop(source, None)
        return child if child is not None and child.process.poll() is None else None

    def keep(self, source: str, child: TemplateChild) -> None:
        """Keep a process, or end it."""
        if source in self._children or len(self._children) >= self._most:
            child.end()
        else:
            self._children[source] = child

    def end(self) -> None:
        """End all that wait, and from now on whatever comes."""
        self._most = 0
        while self._children:
            self._children.popitem()[1].end()


class _Use:
    """What the use of a process holds."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.child: TemplateChild | None = None
        self.source = ""
        #: whether the process has answered all that it was asked
        self.sound = False

    def end(self) -> None:
        if self.child is not None and self.sound:
            self.waiting.keep(self.source, self.child)
        elif self.child is not None:
            self.child.end()


class KeptChild:
    """Stands for a TemplateChild, whose first line brings the template."""

    def __init__(self, waiting: Waiting) -> None:
        self._use = _Use(waiting)
        self.end = weakref.finalize(self, self._use.end)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """As that of a TemplateChild."""
        assert self._use.child is not None
        return self._use.child.process

    def ask(self, line: bytes, seconds: float) -> bytes:
        """As that of a TemplateChild."""
        use = self._use
        if use.child is None:
            use.source = unpack(line)["source"]
            use.child = use.waiting.take(use.source)
            use.sound = use.child is not None
            if use.sound:
                return pack({"text": ""})
            use.child = TemplateChild()
        use.sound = False
        answer = use.child.ask(line, seconds)
        use.sound = answer.endswith(b"\n") and "error" not in unpack(answer)
        return answer

    def silence(self) -> float:
        """As that of a TemplateChild."""
        return 0.0 if self._use.child is None else self._use.child.silence()


def check_once() -> Callable[[ChatFormat], str | None]:
    """`call_mismatch`, once for each template and format of calls."""
    known: dict[tuple[str, str], str | None] = {}

    def check(chat: ChatFormat) -> str | None:
        if chat.template is None:
            return None
        key = chat.template.source, chat.calls.format
        if key not in known:
            known[key] = call_mismatch(chat)
        return known[key]

    return check


@pytest.fixture(scope="module", autouse=True)
def kept_templates(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kept processes in the modules of PLACES, also for models of a whole module."""
    path = Path(request.path)
    if not {path.stem, path.parent.name} & {*PLACES} or path.stem in COUNTING:
        yield
        return
    waiting = Waiting()
    with pytest.MonkeyPatch.context() as patch:
        for starts in (luce.text.open, template):
            patch.setattr(starts, "TemplateChild", functools.partial(KeptChild, waiting))
        patch.setattr(luce.text.open, "call_mismatch", check_once())
        yield
    waiting.end()
