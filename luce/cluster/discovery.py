"""Finding a coordinator on the local network by multicast DNS (RFC 6762, 6763), with the library zeroconf.

An announcement has an address and the first bytes of the coordinator's pin, nothing about models or machines. It grants
nothing: whoever is found has to show the certificate that the token pins, and the token has to be right.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import queue
import secrets
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from luce.errors import DeviceError, UsageError
from luce.ipc.tcp import format_address, parse_address

_SERVICE, _VERSION = "_luce._tcp.local.", b"1"
#: bytes of the pin by which a coordinator is found
ID_BYTES = 8
#: seconds that a lookup waits for an answer
LOOKUP_SECONDS = 5.0
#: seconds that the addresses of a coordinator that was found have to arrive
_ADDRESS_SECONDS = 2.0
#: least of them, for an answer that comes last
_LEAST_SECONDS = 0.5
#: most answers to one lookup, and most addresses of one
_MOST_ANSWERS, _MOST_ADDRESSES = 16, 8


def library_module() -> ModuleType:
    """The library. Raises UsageError without it."""
    try:
        return importlib.import_module("zeroconf")
    except ImportError:
        why = "finding a server by mDNS needs the extra cluster: pip install 'luce-llm[cluster]'"
        raise UsageError(why, param="cluster_announce") from None


def _instance(pin: bytes) -> str:
    """What the names of a coordinator's announcements begin with."""
    return f"luce-{pin[:ID_BYTES].hex()}"


class Announcement:
    """Announces a coordinator with a pin at its addresses (HOST:PORT) until it is closed, on their interfaces alone.

    Raises UsageError without the library, and if no announcement can be sent.
    """

    def __init__(self, addresses: Sequence[str], pin: bytes) -> None:
        library = library_module()
        hosts, ports = zip(*map(parse_address, addresses), strict=True)
        self._hosts, self._port = list(hosts), ports[0]
        own = [host for host in hosts if ipaddress.ip_address(host).version == 4]
        with contextlib.ExitStack() as opened:
            try:
                self._responder: Any = library.Zeroconf(interfaces=own or library.InterfaceChoice.All)
                opened.callback(self._responder.close)
                self.info = self._register(pin)
            except (OSError, library.Error) as error:
                why = f"cannot announce the server by mDNS: {error or type(error).__name__}"
                raise UsageError(why, param="cluster_announce") from None
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Take the announcement back."""
        self._opened.close()

    def renew(self, pin: bytes) -> None:
        """Announce another pin instead."""
        before, self.info = self.info, self._register(pin)
        self._responder.unregister_service(before)

    def _register(self, pin: bytes) -> Any:
        # Somebody else may announce this pin, and two announcements of one name hide each other.
        name = f"{_instance(pin)}-{secrets.token_hex(4)}"
        info = library_module().ServiceInfo(
            _SERVICE,
            f"{name}.{_SERVICE}",
            port=self._port,
            properties={b"v": _VERSION, b"id": pin[:ID_BYTES].hex().encode()},
            server=f"{name}.local.",
            parsed_addresses=self._hosts,
        )
        self._responder.register_service(info)
        return info


def find(pin: bytes, seconds: float = LOOKUP_SECONDS) -> Iterator[tuple[str, ...]]:
    """HOST:PORT of each server that claims to have a pin, as soon as its answer is there, the last one after so many
    seconds: anybody may claim it. Raises DeviceError if none answers, and UsageError without the library."""
    library, names, end = library_module(), queue.SimpleQueue[str](), time.monotonic() + seconds

    def changed(zeroconf: object, service_type: str, name: str, state_change: object) -> None:
        if state_change is not library.ServiceStateChange.Removed and name.startswith(_instance(pin)):
            names.put(name)

    answered, why = set[tuple[str, ...]](), f"no server with this token's key has answered by mDNS within {seconds:g} s"
    try:
        with contextlib.ExitStack() as opened:
            asker = opened.enter_context(contextlib.closing(library.Zeroconf()))
            browser = library.ServiceBrowser(asker, _SERVICE, handlers=[changed])
            # Its thread ends only if it is told to.
            opened.callback(browser.cancel)
            opened.enter_context(contextlib.suppress(queue.Empty))
            while len(answered) < _MOST_ANSWERS:
                # Whoever tries an address of an answer may take long: those that have come meanwhile count.
                name = names.get(timeout=max(0.0, end - time.monotonic()))
                patience = max(_LEAST_SECONDS, min(_ADDRESS_SECONDS, end - time.monotonic()))
                answer = asker.get_service_info(_SERVICE, name, 1000 * patience)
                if answer is None and time.monotonic() < end:
                    # The packet with its addresses was lost, and the browser names it once.
                    names.put(name)
                addresses = () if answer is None else announced_addresses(answer, pin)
                if addresses and addresses not in answered:
                    answered.add(addresses)
                    yield addresses
    except (OSError, library.Error) as error:
        why = f"cannot ask by mDNS: {error or type(error).__name__}"
    if not answered:
        hint = "such traffic may not pass this network, or the server runs without --cluster-announce"
        raise DeviceError(f"{why}: {hint}; join with a token that has an address: `luce cluster token` without --lan")


def announced_addresses(answer: Any, pin: bytes) -> tuple[str, ...]:
    """The addresses of an answer; none if it is for another coordinator."""
    properties = answer.properties
    if properties.get(b"v") != _VERSION or properties.get(b"id") != pin[:ID_BYTES].hex().encode() or not answer.port:
        return ()
    return tuple(format_address(host, answer.port) for host in answer.parsed_addresses()[:_MOST_ADDRESSES])
