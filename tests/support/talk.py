"""A chat with scripted keys, run to its end."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from luce.cli.repl.dispatch import Chat
from luce.cli.repl.model_replier import ModelReplier
from luce.cli.repl.replier import Replier
from luce.cli.repl.session import Screen, Session, Settings
from tests.support.scripted_chat import ScriptedModel


class Keys:
    """Messages in order; `answer` is the answer to every question."""

    def __init__(self, *messages: str, answer: bool = True) -> None:
        self._messages = list(messages)
        self.answer = answer
        self.questions: list[str] = []
        self.defaults: list[str] = []

    def read(self, default: str = "", *, editor: bool = False) -> str:
        self.defaults.append(default)
        if not self._messages:
            raise EOFError
        return self._messages.pop(0)

    def ask(self, question: str) -> bool:
        self.questions.append(question)
        return self.answer


class Talk:
    """A chat that is over: its status, session, notes."""

    def __init__(
        self,
        model: ScriptedModel,
        keys: Keys,
        *,
        system: str | None = None,
        replier: Replier | None = None,
        settings: Settings | None = None,
        width: int = 200,
        **options: Any,
    ) -> None:
        notes = io.StringIO()
        self.model = model
        console = Console(file=notes, width=width, highlight=False, markup=False)
        replier = replier or ModelReplier(model)  # type: ignore[arg-type]
        self.session = Session(replier, keys, Screen(console), settings, **options)
        self.session.conversation.system = system
        self.status = Chat(self.session).talk()
        self.notes = notes.getvalue()
