"""`luce service install|uninstall`: a systemd service of the machine, or of a user, that serves a model."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path

from luce.cli.arguments import MODEL_HELP
from luce.cli.service_files import Service, interpreter, new_key, readable_by_service, unchanged
from luce.errors import LuceError, UsageError
from luce.hub.names import parse_name

_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ACTION, NAME and what the service is."""
    parser.add_argument("action", metavar="ACTION", choices=("install", "uninstall"), help="install or uninstall")
    parser.add_argument(
        "instance", metavar="NAME", nargs="?", default="", help="a further service, luce@NAME, beside others"
    )
    parser.set_defaults(behind_flags="instance")
    parser.add_argument("--model", metavar="MODEL", help=f"install: {MODEL_HELP}")
    parser.add_argument("--port", dest="own_port", metavar="N", type=int, help="install: the port of luce@NAME")
    parser.add_argument("--user", action="store_true", help="a service of this user, not of the machine")
    parser.add_argument("--no-start", action="store_true", help="install: write the files, start nothing")
    parser.add_argument("--force", action="store_true", help="also replace or remove units that were changed by hand")
    parser.add_argument("--root", metavar="DIR", help="write below this directory, and start nothing")


def run(arguments: argparse.Namespace) -> int:
    """Write or remove the files, and say which."""
    service = _service(arguments)
    if arguments.action == "install":
        _install(service, arguments)
    else:
        _uninstall(service, arguments)
    return 0


def _service(arguments: argparse.Namespace) -> Service:
    verb = f"luce service {arguments.action}"
    instance = arguments.instance or ""
    if instance and (not _INSTANCE.fullmatch(instance) or instance in ("luce", "api-keys")):
        raise UsageError(f"{verb} {instance}: expected a name of letters, digits, - and _ that is free")
    if arguments.action == "uninstall":
        given = {"model": arguments.model, "port": arguments.own_port, "no-start": arguments.no_start}
        for name, value in given.items():
            if value:
                raise UsageError(f"{verb}: --{name} is for install")
    if arguments.root is None and not arguments.user and os.geteuid() != 0:
        raise UsageError(f"{verb}: needs root; run it with sudo, or give --user")
    return Service(instance, arguments.user, Path(arguments.root or "/").absolute())


def _install(service: Service, arguments: argparse.Namespace) -> None:
    port = arguments.own_port
    if port is not None and not service.instance:
        raise UsageError("luce service install: --port is for luce@NAME; the port of luce.service is in luce.socket")
    if port is None and service.instance and not service.settings.exists():
        raise UsageError("luce service install: --port: missing; each service has its own")
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"luce service install: --port {port}: expected 1..65535")
    if not arguments.user:
        readable_by_service(interpreter(), "Luce's environment")
    files: list[tuple[Path, str, int]] = []
    if not service.settings.exists():
        if arguments.model is None:
            raise UsageError("luce service install: --model: missing; which model to serve")
        model, name = _model(arguments.model, user=arguments.user)
        files.append((service.settings, service.settings_text(model, name, port), 0o644))
    elif arguments.model is not None or port is not None:
        raise UsageError(f"luce service install: {service.settings} is there: change models and port in it")
    if service.keys is not None and not service.keys.exists():
        files.append((service.keys, new_key(), 0o600))
    for path in service.unit_files:
        if path.exists() and not unchanged(path) and not arguments.force:
            raise UsageError(f"luce service install: {path} was changed by hand; --force replaces it")
        files.append((path, service.text_of(path), 0o644))
    for path, text, mode in files:
        _write(path, text, mode)
        print(f"{path}: written")
    commands = [["daemon-reload"], ["enable", "--now", *service.units]]
    _systemctl(service, commands, start=arguments.root is None and not arguments.no_start)
    if service.keys is not None:
        print(f"Clients need a key of {service.keys}.")


def _model(text: str, *, user: bool) -> tuple[str, str]:
    """The model as the service names it, and its name for requests. Raises UsageError."""
    meant = parse_name(text)
    if not isinstance(meant, Path):
        return text, re.sub(r"[\s,]+", "-", text.rpartition("/")[2].partition(":")[0].removesuffix(".gguf"))
    path = meant.absolute()
    if not path.is_file():
        raise UsageError(f"luce service install: --model {path}: no such file")
    return str(path if user else readable_by_service(path, "--model")), re.sub(r"[\s,]+", "-", path.stem)


def _uninstall(service: Service, arguments: argparse.Namespace) -> None:
    found = [path for path in service.unit_files if path.exists()]
    if not found:
        raise UsageError(f"luce service uninstall: {service.unit_files[-1]}: no such unit")
    for path in found:
        if not unchanged(path) and not arguments.force:
            raise UsageError(f"luce service uninstall: {path} was changed by hand; --force removes it")
    start = arguments.root is None
    _systemctl(service, [["disable", "--now", *service.units]], start=start)
    # The template is that of the other instances, too.
    others = {path for path in service.settings.parent.glob("*.toml") if path.name != "luce.toml"} - {service.settings}
    if not (service.instance and others):
        for path in found:
            path.unlink()
            print(f"{path}: removed")
    _systemctl(service, [["daemon-reload"]], start=start)
    kept = [path for path in (service.settings, service.keys) if path is not None and path.exists()]
    print(f"{', '.join(map(str, kept))} and the caches stay.")


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file in one step; raises UsageError if that is not possible."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A key is never readable to others, not even for a moment.
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(new, mode)
        os.replace(new, path)
    except OSError as error:
        raise UsageError(f"luce service install: {path}: {error.strerror}") from None


def _systemctl(service: Service, commands: list[list[str]], *, start: bool) -> None:
    """Run systemctl, or print what would be run. Raises LuceError if it fails."""
    prefix = ["systemctl", *(["--user"] if service.user else [])]
    for command in commands:
        line = [*prefix, *command]
        if not start or shutil.which("systemctl") is None:
            print(f"not run: {' '.join(line)}")
            continue
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            why = " ".join(done.stderr.split()) or f"status {done.returncode}"
            raise LuceError(f"{' '.join(line)}: {why}")
        print(f"run: {' '.join(line)}")
