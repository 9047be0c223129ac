"""The configuration of each client."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from luce.cli.clients.config_file import ConfigFile
from luce.cli.clients.formats import JSON, TOML, VARIABLES, YAML, Json, plain
from luce.cli.clients.served import Served
from luce.config.environment import environment
from luce.errors import UsageError

#: what clients that insist on a key send to a server without keys
_ANY_KEY = "none"
#: the name of the server in files of clients
_PROVIDER = "luce"


@dataclass(frozen=True)
class Setup:
    """What a client needs to use a server."""

    files: tuple[ConfigFile, ...]
    #: how it is started then
    command: str
    #: variables that do the same without a file
    variables: dict[str, str] = field(default_factory=dict)
    #: tokens of context below which it does not get far, from the size of its first request
    least_context: int = 0


def codex(served: Served) -> Setup:
    """A profile, which is a file of its own beside Codex's configuration."""
    home = Path(environment("CODEX_HOME") or Path.home() / ".codex")
    provider: Json = {"name": "Luce", "base_url": served.api, "wire_api": "responses"}
    if served.key:
        provider["experimental_bearer_token"] = served.key
    changes: Json = {
        "model": served.name,
        "model_provider": _PROVIDER,
        "model_context_window": served.context,
        "model_providers": {_PROVIDER: provider},
    }
    path = home / f"{_PROVIDER}.config.toml"
    return Setup(
        (ConfigFile(path, TOML, changes, bool(served.key)),), f"codex --profile {_PROVIDER}", least_context=16384
    )


def claude(served: Served) -> Setup:
    """Variables, which a file of settings beside Claude Code's own can hold."""
    home = Path(environment("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
    kinds = ("OPUS", "SONNET", "HAIKU")
    variables = {
        "ANTHROPIC_BASE_URL": served.root,
        # Unlike ANTHROPIC_API_KEY, it is used without asking.
        "ANTHROPIC_AUTH_TOKEN": served.key or _ANY_KEY,
        "ANTHROPIC_MODEL": served.name,
        **{f"ANTHROPIC_DEFAULT_{kind}_MODEL": served.name for kind in kinds},
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.reply),
    }
    path = home / f"{_PROVIDER}.json"
    file = ConfigFile(path, JSON, {"env": variables}, bool(served.key))
    return Setup((file,), f"claude --settings {path}", variables, least_context=32768)


def opencode(served: Served) -> Setup:
    """A provider in OpenCode's configuration."""
    model = {
        "name": served.name,
        "limit": {"context": served.context, "output": served.reply},
        "tool_call": True,
        "reasoning": served.reasons,
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Luce",
        "options": {"baseURL": served.api, "apiKey": served.key or _ANY_KEY},
        "models": {served.name: model},
    }
    path = platformdirs.user_config_path("opencode") / "opencode.json"
    file = ConfigFile(path, JSON, {"provider": {_PROVIDER: provider}}, bool(served.key))
    return Setup((file,), f"opencode --model {shlex.quote(f'{_PROVIDER}/{served.name}')}", least_context=16384)


def aider(served: Served) -> Setup:
    """Variables, which win over aider's configuration, and an entry in its list of models. Raises UsageError for a name
    that variables cannot hold."""
    name = f"openai/{served.name}"
    if not plain(name):
        raise UsageError(
            f"aider: its file of variables cannot hold the name {served.name!r}; give the model another one with "
            "`luce serve --alias NAME`",
            param="model",
        )
    path = Path.home() / ".aider.luce.env"
    variables = {
        "AIDER_MODEL": name,
        "AIDER_WEAK_MODEL": name,
        "AIDER_OPENAI_API_BASE": served.api,
        "AIDER_OPENAI_API_KEY": served.key or _ANY_KEY,
    }
    entry = {
        "max_tokens": served.reply,
        "max_input_tokens": served.context,
        "max_output_tokens": served.reply,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    files = (
        ConfigFile(path, VARIABLES, variables, bool(served.key)),
        ConfigFile(Path.home() / ".aider.model.metadata.json", JSON, {name: entry}, secret=False),
    )
    return Setup(files, f"aider --env-file {path}", least_context=4096)


def llm(served: Served) -> Setup:
    """An entry in llm's list of further models, and one among its keys."""
    home = Path(environment("LLM_USER_PATH") or platformdirs.user_config_path("io.datasette.llm"))
    entry: Json = {
        "model_id": _PROVIDER,
        "model_name": served.name,
        "api_base": served.api,
        "supports_schema": True,
        "supports_tools": True,
    }
    if served.key:
        entry["api_key_name"] = _PROVIDER
    files = [ConfigFile(home / "extra-openai-models.yaml", YAML, entry, secret=False)]
    if served.key:
        files.append(ConfigFile(home / "keys.json", JSON, {_PROVIDER: served.key}, secret=True))
    return Setup(tuple(files), f"llm -m {_PROVIDER}")


def openwebui(served: Served) -> Setup:
    """Variables; Open WebUI has no file of settings, and reads them from the database after its first start."""
    variables = {
        "OPENAI_API_BASE_URL": served.api,
        "OPENAI_API_KEY": served.key or _ANY_KEY,
        "ENABLE_OLLAMA_API": "False",
        "ENABLE_PERSISTENT_CONFIG": "False",
    }
    path = platformdirs.user_config_path("luce") / "open-webui.env"
    file = ConfigFile(path, VARIABLES, variables, bool(served.key))
    return Setup((file,), f"set -a; . {path}; open-webui serve", variables)


#: by the name on the command line
PROGRAMS: dict[str, Callable[[Served], Setup]] = {
    "codex": codex,
    "claude": claude,
    "opencode": opencode,
    "aider": aider,
    "llm": llm,
    "openwebui": openwebui,
}
