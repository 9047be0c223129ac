"""What a server tells of a model."""

from __future__ import annotations

from dataclasses import dataclass

from luce.cli.repl.server_client import ServerClient
from luce.errors import ServerError, UsageError

#: longest reply that clients are told of, the limit that agents set by themselves
_LONGEST_REPLY = 32_000


@dataclass(frozen=True)
class Served:
    """A model at a server."""

    #: the address without /v1
    root: str
    name: str
    #: tokens
    context: int
    #: whether the model marks its reasoning
    reasons: bool
    #: empty: the server needs none
    key: str

    @property
    def api(self) -> str:
        """The address of OpenAI's API."""
        return f"{self.root}/v1"

    @property
    def reply(self) -> int:
        """Tokens of the longest reply to plan with: clients keep so much of the context free."""
        return max(1, min(_LONGEST_REPLY, self.context // 4))


def ask(client: ServerClient, key: str, name: str | None) -> Served:
    """The model of this name, or the first that the server lists. Raises ServerError, and UsageError for a name that it
    does not list or a model that clients cannot talk with."""
    models = client.models()
    if not models:
        raise UsageError(f"{client.url} lists no model")
    found = models[0] if name is None else next((model for model in models if name in model.names), None)
    if found is None:
        raise UsageError(
            f"--model {name}: {client.url} has {', '.join(model.names[0] for model in models)}", param="model"
        )
    if found.context is None:
        raise UsageError(f"{client.url}/models does not tell the context of {found.names[0]}")
    if found.capabilities and "chat" not in found.capabilities:
        raise UsageError(f"{found.names[0]} has no chat template: clients cannot talk with it")
    root = client.url.removesuffix("/v1")
    return Served(root, name or found.names[0], found.context, _reasons(client), key)


def _reasons(client: ServerClient) -> bool:
    """Whether Luce's /props says so; other servers do not tell."""
    try:
        props = client.get("/props", root=True)
    except ServerError:
        return False
    reasoning = props.get("reasoning") if isinstance(props, dict) else None
    return isinstance(reasoning, dict) and reasoning.get("supported") is True
