"""A network namespace for a machine of its own, behind a cable: a veth pair. Only root can make it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

#: names of the namespace and of the ends of the cable; a name has at most 15 letters
NAMESPACE, HERE, THERE = (f"luce{os.getpid()}{suffix}" for suffix in ("n", "a", "b"))
#: of its own for each process: tests of several may run at a time
NETWORK = f"10.{192 + os.getpid() // 256 % 64}.{os.getpid() % 256}."
#: of this end of the cable; the other end is NETWORK and 2
ADDRESS = f"{NETWORK}1"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def limit_rate(megabits: int) -> None:
    """Let the cable carry so many Mbit/s in each direction."""
    for tool, device in ((["tc"], HERE), (["tc", "-n", NAMESPACE], THERE)):
        shape = f"qdisc add dev {device} root tbf rate {megabits}mbit burst 32kbit latency 400ms"
        subprocess.run([*tool, *shape.split()], check=True, capture_output=True)


def drop_multicast() -> None:
    """Let nothing that goes to a group leave the namespace. nft is not on every machine; its routes do not decide about
    groups of the link."""
    queue = f"tc -n {NAMESPACE} qdisc add dev {THERE}"
    for command in (
        f"{queue} root handle 1: htb",
        f"tc -n {NAMESPACE} class add dev {THERE} parent 1: classid 1:1 htb rate 8bit",
        f"{queue} parent 1:1 pfifo limit 0",
        f"tc -n {NAMESPACE} filter add dev {THERE} parent 1: protocol ip u32 match ip dst 224.0.0.0/4 flowid 1:1",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)


def _needs_namespaces() -> None:
    """Skips the test of a user who cannot make them."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("makes a network namespace, which only root can, with the program ip")


@dataclass(frozen=True)
class Machine:
    """A namespace behind a cable to a switch, at which this side has ADDRESS. `plug`: the switch's end of the cable."""

    namespace: str
    plug: str

    @property
    def prefix(self) -> list[str]:
        """What runs a program on it."""
        return ["ip", "netns", "exec", self.namespace]

    def pull(self) -> None:
        """Pull its cable: nothing arrives any more, and nobody is told."""
        ip("link", "set", self.plug, "down")

    def push(self) -> None:
        """Put its cable back."""
        ip("link", "set", self.plug, "up")


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """So many machines at a switch. Skips the test where they cannot be made."""
    _needs_namespaces()
    with contextlib.ExitStack() as made:
        try:
            ip("link", "add", HERE, "type", "bridge")
            made.callback(ip, "link", "del", HERE)
            ip("addr", "add", f"{ADDRESS}/24", "dev", HERE)
            ip("link", "set", HERE, "up")
            found = [Machine(f"{NAMESPACE}{number}", f"{THERE}{number}") for number in range(count)]
            for number, machine in enumerate(found):
                ip("netns", "add", machine.namespace)
                made.callback(ip, "netns", "del", machine.namespace)
                ip("link", "add", machine.plug, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
                ip("link", "set", machine.plug, "master", HERE, "up")
                ip("-n", machine.namespace, "addr", "add", f"{NETWORK}{2 + number}/24", "dev", "eth0")
                ip("-n", machine.namespace, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield found


@contextlib.contextmanager
def cabled() -> Iterator[None]:
    """A namespace and its cable. Skips the test where they cannot be made."""
    _needs_namespaces()
    with contextlib.ExitStack() as made:
        try:
            ip("netns", "add", NAMESPACE)
            made.callback(ip, "netns", "del", NAMESPACE)
            ip("link", "add", HERE, "type", "veth", "peer", "name", THERE)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        made.callback(subprocess.run, ["ip", "link", "del", HERE], capture_output=True)
        ip("link", "set", THERE, "netns", NAMESPACE)
        ip("addr", "add", f"{ADDRESS}/24", "dev", HERE)
        ip("link", "set", HERE, "up")
        ip("-n", NAMESPACE, "addr", "add", f"{NETWORK}2/24", "dev", THERE)
        ip("-n", NAMESPACE, "link", "set", THERE, "up")
        yield


@pytest.fixture
def cable() -> Iterator[None]:
    """As cabled, for a test."""
    with cabled():
        yield
