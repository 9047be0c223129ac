"""Listening sockets, own and inherited."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from luce.errors import ListenError
from luce.server.sockets import listen, url

INHERIT = """
import os, socket, sys
os.environ["LISTEN_PID"], os.environ["LISTEN_FDS"] = {pid}, "1"
given = socket.socket(fileno=int(sys.argv[1]))
{prepare}
if given.fileno() != 3:
    os.dup2(given.fileno(), 3); given.close()
else:
    given.detach()
from luce.server.sockets import inherited, url
found = inherited()
print([url(sock) for sock in found], [sock.get_inheritable() for sock in found])
"""


def inherit(pid: str = "str(os.getpid())", prepare: str = "") -> subprocess.CompletedProcess[str]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.set_inheritable(True)
        code = INHERIT.format(pid=pid, prepare=prepare)
        command = [sys.executable, "-c", code, str(sock.fileno())]
        done = subprocess.run(command, pass_fds=[sock.fileno()], capture_output=True, text=True, check=False)
        return subprocess.CompletedProcess(url(sock), done.returncode, done.stdout, done.stderr)


def test_sockets_from_the_manager() -> None:
    done = inherit()
    assert done.stdout == f"['{done.args}'] [False]\n", done.stderr


def test_sockets_for_another_process_are_not_inherited() -> None:
    assert inherit(pid="'1'").stdout == "[] []\n"


def test_a_descriptor_that_does_not_listen() -> None:
    done = inherit(prepare="given.close(); given = socket.socket()")
    assert done.returncode and "ListenError: inherited descriptor 3 is not a listening stream socket" in done.stderr


def test_a_free_port() -> None:
    (sock,) = listen(["127.0.0.1"], 0)
    with sock, socket.create_connection(sock.getsockname()[:2], timeout=10):
        assert url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}" and not url(sock).endswith(":0")


def test_all_addresses_of_a_name_share_a_port() -> None:
    sockets = listen(["localhost"], 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        sock.close()


def test_several_hosts_share_a_port() -> None:
    sockets = listen(["127.0.0.1", "127.0.0.2", "localhost", "127.0.0.1"], 0)
    addresses = [sock.getsockname()[0] for sock in sockets]
    assert addresses[:2] == ["127.0.0.1", "127.0.0.2"] and len(set(addresses)) == len(addresses)
    (port,) = {sock.getsockname()[1] for sock in sockets}
    for address in addresses[:2]:
        socket.create_connection((address, port), timeout=10).close()
    for sock in sockets:
        sock.close()


def test_a_host_that_is_taken_frees_the_others() -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"--host 127.0.0.2 --port {port}: Address already in use"):
            listen(["127.0.0.1", "127.0.0.2"], port)
        (sock,) = listen(["127.0.0.1"], port)
        sock.close()


def test_a_port_in_use_names_the_flags() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"--host 127.0.0.1 --port {port}: Address already in use") as caught:
            listen(["127.0.0.1"], port)
        assert caught.value.exit_code == 5


def test_a_name_that_is_no_address() -> None:
    with pytest.raises(ListenError, match=r"--host no\.such\.name\.invalid: "):
        listen(["no.such.name.invalid"], 0)
