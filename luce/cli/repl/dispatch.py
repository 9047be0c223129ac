"""Reads the input of a chat and hands each line to a command, to a shell, or to the model."""

from __future__ import annotations

from luce.cli.plain_writer import printable
from luce.cli.repl.commands import COMMANDS, LEAVE, shell
from luce.cli.repl.session import Session
from luce.errors import LuceError, UsageError

_LEAVING = {"exit", "quit"}


class Chat:
    """A session and its input."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._status = 0

    def talk(self) -> int:
        """Read and answer until the input ends; the exit status is that of the last error of a pipe."""
        while True:
            try:
                text = self.session.source.read()
                if text in _LEAVING or not self.handle(text):
                    return self._status
            except EOFError:
                return self._status
            except KeyboardInterrupt:  # between a prompt and a reply
                if not self.session.screen.interactive:
                    raise

    def handle(self, text: str) -> bool:
        """Handle a message or command; False if it ends the conversation."""
        name, _, rest = text.partition(" ")
        try:
            if text.startswith("!"):
                shell(self.session, text[1:].strip())
            # A message may begin with a path such as /usr/bin.
            elif not name.startswith("/") or "/" in name[1:]:
                self.session.send(text)
            elif name in LEAVE:
                return False
            elif name in COMMANDS:
                COMMANDS[name].run(self.session, rest.strip())
            else:
                raise UsageError(f"{name}: unknown command; /? lists the commands")
        except LuceError as error:
            self.session.screen.notes.print(f"luce: {printable(str(error))}", style="red", soft_wrap=True)
            if not self.session.screen.interactive:
                self._status = error.exit_code
        return True
