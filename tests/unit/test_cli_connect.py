"""`luce connect` against the application: what it prints and writes, and what it leaves alone."""

from __future__ import annotations

import asyncio
import json
import socket
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from luce.cli.clients.programs import PROGRAMS
from luce.cli.main import main
from tests.support.http_server import Running, running

KEY = "sesame"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any file."""
    for name in ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "LLM_USER_PATH", "XDG_CONFIG_HOME", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
async def here() -> AsyncIterator[Running]:
    async with running(api_key=(KEY,), alias=("tiny", "small"), model={"context": 40_000}) as here:
        yield here


async def connect(here: Running, *arguments: str, key: str = KEY) -> int:
    """The exit status of the command."""
    keyed = ["--api-key", key] if key else []
    return await asyncio.to_thread(main, ["connect", *arguments, "--server", here.url, *keyed])


def files(home: Path) -> dict[str, str]:
    """The texts of all files."""
    return {str(p.relative_to(home)): p.read_text() for p in sorted(home.rglob("*")) if p.is_file()}


def parsed(name: str, text: str) -> Any:
    if name.endswith(".json"):
        return json.loads(text)
    if name.endswith(".toml"):
        return tomllib.loads(text)
    if name.endswith(".yaml"):
        return yaml.safe_load(text)
    return dict(line.split("=", 1) for line in text.splitlines())


async def written(here: Running, home: Path, client: str) -> dict[str, Any]:
    """The data of the files that a client gets, which only their owner may read."""
    assert await connect(here, client, "--write") == 0
    for path in home.rglob("*"):
        assert path.is_dir() or path.stat().st_mode & 0o077 == 0
    return {name: parsed(name, text) for name, text in files(home).items()}


async def test_codex(here: Running, home: Path) -> None:
    provider = {
        "name": "Luce",
        "base_url": here.url + "/v1",
        "wire_api": "responses",
        "experimental_bearer_token": KEY,
    }
    assert await written(here, home, "codex") == {
        ".codex/luce.config.toml": {
            "model": "tiny",
            "model_provider": "luce",
            "model_context_window": 40_000,
            "model_providers": {"luce": provider},
        }
    }


async def test_claude(here: Running, home: Path) -> None:
    (settings,) = (await written(here, home, "claude")).values()
    assert settings["env"] == {
        "ANTHROPIC_BASE_URL": here.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "tiny",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "tiny",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "40000",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "10000",
    }


async def test_opencode(here: Running, home: Path) -> None:
    found = await written(here, home, "opencode")
    provider = found[".config/opencode/opencode.json"]["provider"]["luce"]
    assert provider["options"] == {"baseURL": here.url + "/v1", "apiKey": KEY}
    assert provider["models"]["tiny"]["limit"] == {"context": 40_000, "output": 10_000}
    assert provider["models"]["tiny"]["reasoning"] is True


async def test_a_command_with_a_name_of_several_words_is_quoted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(alias=("Qwen3 4B",)) as here:
        assert await connect(here, "opencode", "--write", key="") == 0
    assert capsys.readouterr().out.endswith("\nstart it: opencode --model 'luce/Qwen3 4B'\n")


async def test_aider(here: Running, home: Path) -> None:
    found = await written(here, home, "aider")
    assert found[".aider.luce.env"] == {
        "AIDER_MODEL": "openai/tiny",
        "AIDER_WEAK_MODEL": "openai/tiny",
        "AIDER_OPENAI_API_BASE": here.url + "/v1",
        "AIDER_OPENAI_API_KEY": KEY,
    }
    assert found[".aider.model.metadata.json"]["openai/tiny"]["max_input_tokens"] == 40_000


async def test_aider_needs_a_name_without_blanks(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(alias=("Qwen3 4B", "qwen3-4b")) as here:
        for flags, status in (((), 2), (("--write",), 2), (("--model", "qwen3-4b"), 0)):
            assert await connect(here, "aider", *flags, key="") == status
    error = capsys.readouterr().err
    message = "luce: aider: its file of variables cannot hold the name 'Qwen3 4B'; give the model another one with "
    assert error.splitlines()[:2] == [f"{message}`luce serve --alias NAME`"] * 2


async def test_llm(here: Running, home: Path) -> None:
    found = await written(here, home, "llm")
    (entry,) = found[".config/io.datasette.llm/extra-openai-models.yaml"]
    assert (entry["model_id"], entry["model_name"], entry["api_base"]) == ("luce", "tiny", here.url + "/v1")
    assert found[".config/io.datasette.llm/keys.json"] == {entry["api_key_name"]: KEY}


async def test_openwebui(here: Running, home: Path) -> None:
    (variables,) = (await written(here, home, "openwebui")).values()
    assert (variables["OPENAI_API_BASE_URL"], variables["OPENAI_API_KEY"]) == (here.url + "/v1", KEY)


@pytest.mark.parametrize("client", PROGRAMS)
async def test_without_write_it_only_prints(
    here: Running, home: Path, client: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await connect(here, client) == 0
    printed = capsys.readouterr().out
    assert files(home) == {}
    assert here.url in printed and KEY in printed
    for name in await written(here, home, client):
        assert str(home / name) in printed


async def test_directories_that_the_environment_names(
    here: Running, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "LLM_USER_PATH", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(home / name))
    for client in ("codex", "claude", "llm", "opencode"):
        assert await connect(here, client, "--write") == 0
    assert {name.split("/")[0] for name in files(home)} == {
        "CODEX_HOME",
        "CLAUDE_CONFIG_DIR",
        "LLM_USER_PATH",
        "XDG_CONFIG_HOME",
    }


async def test_another_name_and_a_server_without_keys(home: Path) -> None:
    async with running(alias=("tiny", "small")) as here:
        assert await connect(here, "codex", "--write", "--model", "small", key="") == 0
    (profile,) = (parsed(name, text) for name, text in files(home).items())
    assert profile["model"] == "small" and "experimental_bearer_token" not in profile["model_providers"]["luce"]


async def test_what_was_there_stays_and_has_a_backup(
    here: Running, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / ".config/opencode/opencode.json"
    path.parent.mkdir(parents=True)
    mine = {"theme": "dark", "provider": {"mine": {"npm": "x"}, "luce": {"options": {"baseURL": "http://old", "t": 1}}}}
    # The file itself is elsewhere, as in a repository of dot files.
    real = home / "dotfiles.json"
    real.write_text(json.dumps(mine))
    real.chmod(0o644)
    path.symlink_to(real)
    assert await connect(here, "opencode", "--write") == 0
    found = json.loads(path.read_text())
    assert path.is_symlink() and real.stat().st_mode & 0o777 == 0o600
    assert found["theme"] == "dark" and found["provider"]["mine"] == {"npm": "x"}
    assert found["provider"]["luce"]["options"] == {"baseURL": here.url + "/v1", "t": 1, "apiKey": KEY}
    backup = home / "dotfiles.json.bak"
    assert json.loads(backup.read_text()) == mine and str(backup) in capsys.readouterr().out
    # Once more: nothing to do, and no second backup.
    assert await connect(here, "opencode", "--write") == 0
    assert "has it already" in capsys.readouterr().out and sorted(files(home)) == [
        ".config/opencode/opencode.json",
        "dotfiles.json",
        "dotfiles.json.bak",
    ]
    # A change has a backup of its own.
    assert await connect(here, "opencode", "--write", "--model", "small") == 0
    assert json.loads(backup.read_text()) == mine and (home / "dotfiles.json.bak1").exists()


async def test_a_file_that_cannot_be_parsed_is_left_alone(
    here: Running, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = home / ".aider.model.metadata.json"
    broken.write_text('{"mine": ')
    assert await connect(here, "aider", "--write") == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert str(broken) in output.err and "cannot be parsed" in output.err and "left as it was" in output.err
    # The other file of this client is not written either.
    assert files(home) == {broken.name: '{"mine": '}


async def test_a_file_that_cannot_be_written(here: Running, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / ".codex").write_text("no directory")
    assert await connect(here, "codex", "--write") == 2
    assert str(home / ".codex") in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, key, status, message",
    [
        (("codex",), "wrong", 7, "401"),
        (("codex", "--model", "zzz"), KEY, 2, "--model zzz"),
        (("vim",), KEY, 2, "CLIENT"),
        (("aider",), "two words", 7, "401"),
    ],
)
async def test_what_is_refused(
    here: Running,
    home: Path,
    arguments: tuple[str, ...],
    key: str,
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await connect(here, *arguments, key=key) == status
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and files(home) == {}


def test_no_server(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect", "codex", "--server", "http://127.0.0.1:9"]) == 7
    assert capsys.readouterr().err == "luce: http://127.0.0.1:9/v1: Connection refused\n"


def test_no_such_host(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(socket.gaierror) as known:
        socket.getaddrinfo("nowhere.invalid", 80)
    assert main(["connect", "codex", "--server", "http://nowhere.invalid"]) == 7
    assert capsys.readouterr().err == f"luce: http://nowhere.invalid/v1: {known.value.strerror}\n"


async def test_a_server_without_tls(here: Running, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = here.url.replace("http:", "https:")
    assert await asyncio.to_thread(main, ["connect", "codex", "--server", url]) == 7
    error = capsys.readouterr().err
    assert error.startswith(f"luce: {url}/v1: [SSL: ") and error.count("\n") == 1


async def test_a_small_context_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running() as here:
        assert await connect(here, "claude", key="") == 0
    assert "512 tokens is small for claude" in capsys.readouterr().err
