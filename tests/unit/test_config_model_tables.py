"""Tables `[models.NAME]` of the TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from luce.config.file import RENAMED
from luce.config.model_tables import ModelTable, read_tables
from luce.config.resolve import config_file, resolve
from luce.config.settings import FIELDS
from luce.errors import UsageError

TEXT = """
max_ctx = 4096
port = 1234

[models.small]
model = "org/small:Q4_K_M"
pinned = true

[models."big-27b"]
model = "/srv/big.gguf"
ttl = 600
alias = ["big"]
max-ctx = 8192
target_devices = ["cpu:0", "cpu:1"]
temperature = 0.5
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "luce.toml"
    path.write_text(text)
    return path


def test_tables(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    small, big = read_tables(path)
    assert small == ModelTable("small", "org/small:Q4_K_M", True, 0.0, {"alias": ["small"]}, f"{path}: models.small")
    assert (big.name, big.model, big.pinned, big.ttl) == ("big-27b", "/srv/big.gguf", False, 600.0)


def test_a_table_is_stronger_than_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    small, big = read_tables(path)
    given = {"config": str(path), "parallel": "2", "temperature": "0.9"}
    first = resolve(given, env={}, table=(small.settings, small.origin))
    second = resolve(given, env={"LUCE_MAX_CTX": "1024"}, table=(big.settings, big.origin))
    assert (first.max_ctx, first.parallel, first.alias) == (4096, 2, ("small",))
    assert (second.max_ctx, second.parallel, second.alias) == (8192, 2, ("big-27b", "big"))
    assert second.target_devices == ("cpu:0", "cpu:1")
    assert [getattr(config, "temperature") for config in (first, second)] == [0.9, 0.5]  # noqa: B009
    # The other verbs read the same file.
    assert resolve({"config": str(path)}, env={}).max_ctx == 4096


def test_no_tables(tmp_path: Path) -> None:
    assert read_tables(written(tmp_path, "port = 1\n")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 3", r"models: expected tables \[models.NAME\]$"),
        ("[models]\nx = 3", r"models.x: expected a table, with a name without commas and spaces$"),
        ('[models."a b"]\nmodel = "x"', r"models.a b: expected a table, with a name"),
        ("[models.x]", r"models.x.model: expected a path or a name of a model, got None$"),
        ('[models.x]\nmodel = "m"\npinned = 1', r"models.x.pinned: expected true or false, got 1$"),
        ('[models.x]\nmodel = "m"\nttl = -1', r"models.x.ttl: expected seconds, got -1$"),
        ('[models.x]\nmodel = "m"\nttl = true', r"models.x.ttl: expected seconds, got True$"),
        ('[models.x]\nmodel = "m"\nport = 1', r"models.x.port: is a setting of the server, not of one model$"),
        ('[models.x]\nmodel = "m"\nalias = "y"', r"models.x.alias: expected a list of names, got 'y'$"),
        ('[models.x]\n[models.y]\nmodel = ""', r"models.x.model: .*; .*models.y.model: "),
    ],
)
def test_wrong_tables(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=message) as caught:
        read_tables(path)
    assert str(caught.value).startswith(f"{path}: models")


def test_a_wrong_setting_names_its_table(tmp_path: Path) -> None:
    path = written(tmp_path, '[models.x]\nmodel = "m"\nmax_ctxx = 1\nparallel = "many"')
    (table,) = read_tables(path)
    with pytest.raises(
        UsageError, match=r"models.x.max_ctxx: no such setting; did you mean models.x.max_ctx\?; .*x.parallel: "
    ):
        resolve({}, env={}, table=(table.settings, table.origin))


def test_the_file_of_the_settings() -> None:
    assert config_file({"config": "a.toml"}, {"LUCE_CONFIG": "b.toml"}) == Path("a.toml")
    assert config_file({}, {"LUCE_CONFIG": "b.toml"}) == Path("b.toml")
    assert config_file({}, {}) is None


def test_keys_of_earlier_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "luce.toml"
    path.write_text('draft = "mtp"\ndraft-tail = 5\n[models.a]\nmodel = "a.gguf"\ndraft_tail = 7\n')
    assert resolve({"config": str(path)}, env={}).draft_feature_tail == 5
    (table,) = read_tables(path)
    assert table.settings["draft_feature_tail"] == 7
    # One line each, however often the file is read.
    resolve({"config": str(path)}, env={})
    told = [f"{path}: {key} is called draft_feature_tail now" for key in ("draft-tail", "draft_tail")]
    assert caplog.messages == told
    path.write_text("draft_tail = 5\ndraft_feature_tail = 5\n")
    with pytest.raises(UsageError, match="draft_tail and draft_feature_tail are the same setting"):
        resolve({"config": str(path)}, env={})
    assert set(RENAMED.values()) <= set(FIELDS) and not set(RENAMED) & set(FIELDS)
