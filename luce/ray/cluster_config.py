"""The TOML file of `luce ray`: what runs, on which devices, and where Ray's head is."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from luce.config.suggest import nearest
from luce.errors import UsageError

#: kinds of devices; a node offers each as the resource `luce_KIND`
KINDS = ("cpu", "cuda", "hip")
_LONGEST_NAME = 32


@dataclass(frozen=True)
class HeadConfig:
    """The table [head]: the node with Ray's control store."""

    #: IP address that the other nodes reach the head at; loopback means one machine
    address: str = "127.0.0.1"
    #: port of the control store
    port: int = 6379
    #: where clients reach the models, on every node: loopback, or all addresses
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    #: file with Ray's token, the same on all nodes; "": one in the user's data directory
    token_file: str = ""
    #: folder with keys of TLS between all processes of Ray, which `luce ray keys` makes; "": they do not encrypt
    tls_folder: str = ""
    #: MiB of Ray's object store on each node: no tensor goes through it
    object_store_mib: int = 100
    #: seconds without the control store after which the processes of a node end; 0: they serve on without it
    timeout: float = 0.0


@dataclass(frozen=True)
class ReplicaConfig:
    """The table [replica]: one copy of the model."""

    #: kinds of the devices of `luce serve`, one device each
    devices: tuple[str, ...] = ("cpu",)
    #: kinds of the devices of further shards, each in a process of its own, anywhere in the cluster
    shards: tuple[str, ...] = ()
    #: whether all of them must be on one machine
    one_machine: bool = False
    #: further arguments of `luce serve`
    flags: tuple[str, ...] = ()
    #: requests that a replica serves at once: its --parallel
    parallel: int = 4
    #: seconds that running requests have before a replica ends
    drain: float = 30.0
    #: copies: at least and at most
    least: int = 1
    most: int = 1
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0


@dataclass(frozen=True)
class ClusterConfig:
    """A whole file."""

    #: GGUF file, at the same path on all nodes, or a name that `luce pull` knows
    model: str
    name: str = "luce"
    #: file with the clients' API keys, as --api-key-file; "": clients need none
    api_key_file: str = ""
    #: `prefix`: to the replica that has most of the prompt cached; `default`: as Ray Serve does
    routing: str = "prefix"
    #: seconds for which a stream whose replica is lost waits for another one that goes on with it; 0: it ends
    resume: float = 120.0
    #: by kind of device, the interpreter that Luce is installed for on all nodes
    luce_python: Mapping[str, str] = field(default_factory=dict)
    head: HeadConfig = field(default_factory=HeadConfig)
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The placement group of a replica: first `luce serve`, then each shard."""
        first: dict[str, float] = {}
        for kind in self.replica.devices:
            first[f"luce_{kind}"] = first.get(f"luce_{kind}", 0.0) + 1.0
        return [first, *({f"luce_{kind}": 1.0} for kind in self.replica.shards)]

    @property
    def strategy(self) -> str:
        """How Ray places these bundles."""
        return "STRICT_PACK" if self.replica.one_machine else "PACK"


def read_config(path: Path) -> ClusterConfig:
    """The configuration in a file. Raises UsageError that names the file and the key."""
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}", param="config") from None
    try:
        return parse_config(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}", param="config") from None


def parse_config(content: Mapping[str, Any]) -> ClusterConfig:
    """The configuration of a file's keys and values. Raises UsageError that names the key."""
    values = dict(content)
    tables = {"head": HeadConfig, "replica": ReplicaConfig}
    parsed: dict[str, Any] = {name: _table(name, kind, values.pop(name, {})) for name, kind in tables.items()}
    python = values.pop("luce_python", {})
    if not isinstance(python, dict) or not all(isinstance(path, str) and path for path in python.values()):
        raise UsageError("luce_python: expected a table with a path for each kind of device")
    for kind in python:
        _check_kind("luce_python", kind)
    if not values.get("model"):
        raise UsageError("model: missing; give a GGUF file or a name")
    config: ClusterConfig = _table("", ClusterConfig, values, {**parsed, "luce_python": python})
    _check(config)
    return config


def plain_content(config: ClusterConfig) -> dict[str, Any]:
    """A configuration as the content of a TOML file: nothing of Luce is pickled."""

    def listed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: listed(item) for key, item in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return dict(listed(dataclasses.asdict(config)))


def _table(where: str, kind: type[Any], values: object, parsed: Mapping[str, Any] = {}) -> Any:
    """An instance of a dataclass of a table's values; `parsed`: fields that are known already."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{where}: expected a table")
    fields = {each.name: each for each in dataclasses.fields(kind)}
    found = dict(parsed)
    for key, value in values.items():
        name = f"{where}.{key}" if where else key
        if key not in fields:
            raise UsageError(f"{name}: unknown{nearest(key, fields)}")
        expected, accepts = _TYPES[str(fields[key].type)]
        if not accepts(value):
            raise UsageError(f"{name}: expected {expected}")
        found[key] = tuple(value) if isinstance(value, list) else value
    return kind(**found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


#: by the annotation of a field, what its value must be
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda value: isinstance(value, str)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number, 0 or more", lambda value: isinstance(value, int) and _is_number(value)),
    "float": ("a number, 0 or more", _is_number),
    "tuple[str, ...]": (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
}
#: arguments of `luce serve` that a replica sets itself
_TAKEN = {"--host", "--port", "--parallel", "--drain-seconds", "--target-device", "--target-devices", "--devices"}
_TAKEN |= {"--shard-key-file", "--api-key", "--api-key-file", "--cluster"}


def _check(config: ClusterConfig) -> None:
    """Raises UsageError for values that do not go together."""
    replica, head = config.replica, config.head
    if not config.name.isidentifier() or len(config.name) > _LONGEST_NAME:
        raise UsageError(f"name: expected letters, digits and _, at most {_LONGEST_NAME}")
    if config.routing not in ("prefix", "default"):
        raise UsageError("routing: expected prefix or default")
    if not replica.devices:
        raise UsageError("replica.devices: expected at least one kind of device")
    for name, kinds in (("devices", replica.devices), ("shards", replica.shards)):
        for kind in kinds:
            _check_kind(f"replica.{name}", kind)
            if kind not in config.luce_python:
                raise UsageError(f"luce_python.{kind}: missing; replica.{name} names {kind}")
    if len(set(replica.devices)) > 1:
        raise UsageError("replica.devices: one process has devices of one kind; name the others in replica.shards")
    for flag in replica.flags:
        if flag.partition("=")[0] in _TAKEN:
            raise UsageError(f"replica.flags: {flag} is set by `luce ray`")
    if replica.parallel < 1:
        raise UsageError("replica.parallel: expected 1 or more")
    if not 1 <= replica.least <= replica.most:
        raise UsageError("replica.least: expected 1 or more, and at most replica.most")
    for name, port in (("port", head.port), ("http_port", head.http_port)):
        if not 0 < port < 65536:
            raise UsageError(f"head.{name}: expected a port in 1..65535")
    if head.object_store_mib < 75:
        raise UsageError("head.object_store_mib: expected 75 or more, which Ray needs")


def _check_kind(where: str, kind: str) -> None:
    if kind not in KINDS:
        raise UsageError(f"{where}: {kind} is no kind of device; expected {', '.join(KINDS)}")
