"""`luce service`: the units that it writes, checked by systemd's own tools, and what it leaves alone."""

from __future__ import annotations

import grp
import os
import re
import stat
import sys
import tomllib
from pathlib import Path

import pytest

from luce.cli.main import main
from luce.cli.service_files import Service, interpreter
from luce.config.model_tables import read_tables
from luce.config.resolve import resolve
from tests.support.systemd_units import check_exposure, check_units, needs_systemd

MODEL = Path(__file__).parents[1] / "reference" / "qwen3-a-F32.gguf"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A staged tree. Luce's environment seems to be one that a service may read."""
    monkeypatch.setattr(sys, "prefix", "/opt/luce")
    monkeypatch.setenv("HOME", "/home/me")
    return tmp_path / "root"


def service(*words: str, root: Path) -> int:
    return main(["service", *words, "--root", str(root)])


def exec_start(path: Path) -> str:
    found = re.search(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_a_service_of_the_machine(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert service("install", "--model", "ORG/Some-GGUF:Q4_K_M", root=root) == 0
    out = capsys.readouterr().out
    etc = root / "etc"
    for path in ("luce/luce.toml", "luce/api-keys", "systemd/system/luce.service", "systemd/system/luce.socket"):
        assert f"{etc / path}: written\n" in out
    assert "not run: systemctl daemon-reload\nnot run: systemctl enable --now luce.socket luce.service\n" in out
    assert exec_start(etc / "systemd/system/luce.service").endswith(" serve --config /etc/luce/luce.toml")
    assert stat.S_IMODE((etc / "luce/api-keys").stat().st_mode) == 0o600
    assert re.fullmatch(r"first:[0-9a-f]{48}:admin\n", (etc / "luce/api-keys").read_text())
    (table,) = read_tables(etc / "luce/luce.toml")
    assert (table.name, table.model, table.pinned) == ("Some-GGUF", "ORG/Some-GGUF:Q4_K_M", True)
    assert resolve({"config": str(etc / "luce/luce.toml")}, env={}) == resolve({}, env={})


def test_a_second_install_keeps_settings_and_keys(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service("install", "--model", "smollm2", root=root)
    key = (root / "etc/luce/api-keys").read_text()
    settings = root / "etc/luce/luce.toml"
    settings.write_text("max_ctx = 1\n")
    capsys.readouterr()
    assert service("install", root=root) == 0
    assert capsys.readouterr().out.count(": written\n") == 2
    assert settings.read_text() == "max_ctx = 1\n" and (root / "etc/luce/api-keys").read_text() == key
    assert service("install", "--model", "other/m", root=root) == 2
    assert capsys.readouterr().err == (
        f"luce: luce service install: {settings} is there: change models and port in it\n"
    )


def test_units_that_were_changed_by_hand_stay(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service("install", "--model", "smollm2", root=root)
    unit = root / "etc/systemd/system/luce.service"
    unit.write_text(unit.read_text() + "# mine\n")
    capsys.readouterr()
    assert service("install", root=root) == 2
    assert capsys.readouterr().err == (f"luce: luce service install: {unit} was changed by hand; --force replaces it\n")
    assert service("uninstall", root=root) == 2
    assert "# mine" in unit.read_text() and (root / "etc/systemd/system/luce.socket").exists()
    assert service("install", "--force", root=root) == 0
    assert "# mine" not in unit.read_text()


def test_uninstall(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service("install", "--model", "smollm2", root=root)
    capsys.readouterr()
    assert service("uninstall", root=root) == 0
    out = capsys.readouterr().out
    assert not list((root / "etc/systemd/system").iterdir())
    assert out.endswith(f"{root}/etc/luce/luce.toml, {root}/etc/luce/api-keys and the caches stay.\n")
    assert service("uninstall", root=root) == 2
    assert capsys.readouterr().err.endswith("luce.service: no such unit\n")


def test_instances_share_a_template(root: Path) -> None:
    for name, port in (("small", "8081"), ("big", "8082")):
        assert service("install", name, "--model", "smollm2", "--port", port, root=root) == 0
    template = root / "etc/systemd/system/luce@.service"
    assert exec_start(template).endswith(" serve --config /etc/luce/%i.toml")
    lines = template.read_text().splitlines()
    for line in ("StateDirectory=luce-%i", "CacheDirectory=luce-%i", "Environment=HF_HOME=%C/luce-%i/huggingface"):
        assert line in lines
    assert tomllib.loads((root / "etc/luce/big.toml").read_text())["port"] == 8082
    assert service("uninstall", "small", root=root) == 0
    assert template.exists()
    (root / "etc/luce/small.toml").unlink()
    assert service("uninstall", "big", root=root) == 0
    assert not template.exists()


def test_a_service_of_a_user(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert service("install", "--user", "--model", str(MODEL), root=root) == 0
    unit = root / "home/me/.config/systemd/user/luce.service"
    assert exec_start(unit).endswith(" serve --config /home/me/.config/luce/luce.toml")
    text = unit.read_text()
    assert "WantedBy=default.target" in text
    # What a manager without privileges cannot do, or what hides the user's files.
    assert not re.search("DynamicUser|ProtectHome|CapabilityBoundingSet|LoadCredential|OOMScore|DeviceAllow", text)
    assert read_tables(root / "home/me/.config/luce/luce.toml")[0].model == str(MODEL)
    assert "systemctl --user enable" in capsys.readouterr().out
    assert not list(root.rglob("api-keys"))


@needs_systemd
@pytest.mark.parametrize("words", [(), ("small", "--port", "8081"), ("--user",), ("small", "--port", "8081", "--user")])
def test_systemd_takes_the_units(words: tuple[str, ...], root: Path, tmp_path: Path) -> None:
    assert service("install", *words, "--model", "smollm2", root=root) == 0
    folder = tmp_path / "units"
    folder.mkdir()
    for path in root.rglob("luce*.s*"):
        text = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", path.read_text(), flags=re.MULTILINE)
        (folder / path.name.replace("@.", "@small.")).write_text(text)
    check_units(folder.iterdir())
    if "--user" not in words:
        check_exposure(next(folder.glob("*.service")))


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for systemctl that records its arguments, and fails where they have the word of a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "systemctl"
    script.write_text(
        f'#!/bin/sh\necho "$*" >> {folder}/log\n'
        f'if [ -f {folder}/fail ] && [ "$1" = "$(cat {folder}/fail)" ]; then echo "Failed to do it." >&2; exit 1; fi\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def test_systemctl_runs(systemctl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "install", "--user", "--model", "smollm2"]) == 0
    assert main(["service", "uninstall", "--user"]) == 0
    assert (systemctl / "log").read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable --now luce.socket luce.service",
        "--user disable --now luce.socket luce.service",
        "--user daemon-reload",
    ]


def test_the_service_gets_the_groups_that_are_here(
    systemctl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(name: str) -> str:
        if name != "video":
            raise KeyError(name)
        return name

    monkeypatch.setattr(grp, "getgrnam", group)
    text = Service("", False, Path("/")).text_of(Path("/etc/systemd/system/luce.service"))
    assert "\nSupplementaryGroups=video\n" in text
    monkeypatch.setattr(grp, "getgrnam", {}.__getitem__)
    text = Service("", False, Path("/")).text_of(Path("/etc/systemd/system/luce.service"))
    assert "SupplementaryGroups" not in text


def test_no_start(systemctl: Path) -> None:
    assert main(["service", "install", "--user", "--model", "smollm2", "--no-start"]) == 0
    assert not (systemctl / "log").exists()


def test_a_systemctl_that_fails(systemctl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (systemctl / "fail").write_text("--user")
    assert main(["service", "install", "--user", "--model", "smollm2"]) == 1
    assert capsys.readouterr().err == "luce: systemctl --user daemon-reload: Failed to do it.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("install",), "--model: missing; which model to serve"),
        (("install", "a b", "--model", "smollm2"), "a b: expected a name of letters, digits"),
        (("install", "luce", "--model", "smollm2"), "luce: expected a name"),
        (("install", "x", "--model", "smollm2"), "--port: missing; each service has its own"),
        (("install", "x", "--model", "smollm2", "--port", "0"), "--port 0: expected 1..65535"),
        (("install", "--model", "smollm2", "--port", "1"), "--port is for luce@NAME; the port of luce.service is in"),
        (("install", "--model", "/nowhere.gguf"), "--model /nowhere.gguf: no such file"),
        (("install", "--model", "nothing"), "model 'nothing': no such file"),
        (("uninstall", "--model", "smollm2"), "luce service uninstall: --model is for install"),
    ],
)
def test_wrong_arguments(words: tuple[str, ...], message: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert service(*words, root=root) == 2
    assert message in capsys.readouterr().err
    assert not root.exists()


def test_what_the_service_may_not_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/.venv")
    assert str(interpreter()) == "/home/me/.venv"
    assert service("install", "--model", "smollm2", root=root) == 2
    assert capsys.readouterr().err == (
        "luce: luce service install: Luce's environment /home/me/.venv is below /home, which the service may not read\n"
    )
    assert service("install", "--user", "--model", "smollm2", root=root) == 0


def test_only_root_installs_for_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["service", "install", "--model", "smollm2"]) == 2
    assert capsys.readouterr().err == "luce: luce service install: needs root; run it with sudo, or give --user\n"


def test_a_path_with_a_space(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "luce").touch()
    monkeypatch.setattr(sys, "prefix", str(folder))
    assert service("install", "--model", "smollm2", root=root) == 0
    assert exec_start(root / "etc/systemd/system/luce.service").startswith(f'"{folder}/bin/luce" serve')
