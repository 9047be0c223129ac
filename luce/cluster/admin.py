"""The socket in a cluster's directory over which `luce cluster` talks with the coordinator.

Whoever may enter the directory may use it, which is its user alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from luce.cluster import wire
from luce.cluster.cluster_files import ClusterFiles
from luce.cluster.coordinator import Coordinator
from luce.errors import LuceError, ServerError
from luce.ipc.channel import Channel, ChannelError

_log = logging.getLogger("luce.cluster")
#: seconds that a command has to send its request, and the coordinator to answer
_REQUEST_SECONDS, ANSWER_SECONDS = 5.0, 60.0
_SOCKET = "socket"
#: what everybody who lets a host join has to know
TRUST = "a member sees activations, from which texts can be recovered, and can compute wrong results"


def join_command(coordinator: Coordinator, seconds: float, label: str = "", *, lan: bool = False) -> str:
    """What to type on a machine that is to join, and what that means, with a new token. `lan`: as in new_token."""
    token = coordinator.new_token(seconds, label, lan=lan)
    return f"luce join {token}\n\nThe token lets one machine join, within {seconds / 60:g} minutes: {TRUST}."


@contextlib.contextmanager
def answering(coordinator: Coordinator, replan: Callable[[], None]) -> Iterator[None]:
    """Answer commands until the block ends. `replan` lets the server place its model anew; it raises ServerError, and
    does not wait for that."""
    with _at(coordinator.files) as path, socket.socket(socket.AF_UNIX) as listener:
        with contextlib.suppress(FileNotFoundError):
            # Of a coordinator that was killed: only one at a time has the lock of the directory.
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        closing = threading.Event()
        arguments = coordinator, replan, listener, closing
        thread = threading.Thread(target=_accept, args=arguments, name="luce-cluster-commands", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closing.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            os.unlink(path)


def ask(files: ClusterFiles, command: wire.Command) -> wire.Status | wire.Done:
    """What the coordinator of a cluster answers. Raises ServerError if none runs here, or if it cannot do it."""
    with contextlib.ExitStack() as opened:
        path = opened.enter_context(_at(files))
        sock = opened.enter_context(socket.socket(socket.AF_UNIX))
        try:
            sock.connect(path)
        except OSError:
            raise ServerError(f"cluster {files.name}: no server of it runs on this machine") from None
        channel: Channel[Any] = Channel(sock, wire.Result)
        try:
            channel.send(0, command, timeout=_REQUEST_SECONDS)
            _, answer = channel.receive(timeout=ANSWER_SECONDS)
        except ChannelError as error:
            raise ServerError(f"cluster {files.name}: {error}") from None
    if isinstance(answer, wire.Failed):
        raise ServerError(answer.message)
    assert isinstance(answer, wire.Status | wire.Done)
    return answer


@contextlib.contextmanager
def _at(files: ClusterFiles) -> Iterator[str]:
    """A path of the socket that is short enough, whatever the directory's is."""
    fd = os.open(files.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{_SOCKET}"
    finally:
        os.close(fd)


def _accept(
    coordinator: Coordinator, replan: Callable[[], None], listener: socket.socket, closing: threading.Event
) -> None:
    while not closing.is_set():
        try:
            sock, _ = listener.accept()
        except OSError:
            # Closing, or no descriptor is free at present.
            closing.wait(0.1)
            continue
        channel: Channel[Any] = Channel(sock, wire.Command)
        with contextlib.closing(channel):
            try:
                number, command = channel.receive(timeout=_REQUEST_SECONDS)
                channel.send(number, _answer(coordinator, replan, command), timeout=_REQUEST_SECONDS)
            except ChannelError as error:
                _log.warning("a command for the cluster failed: %s", error)


def _answer(coordinator: Coordinator, replan: Callable[[], None], command: wire.Command) -> wire.Result:
    try:
        match command:
            case wire.AskStatus():
                return coordinator.status()
            case wire.AskToken(seconds, label, lan):
                return wire.Done(join_command(coordinator, seconds, label, lan=lan))
            case wire.AskRemove(member):
                coordinator.remove(member)
                return wire.Done(f"{member} is removed")
            case wire.AskDrain(member):
                coordinator.drain(member)
                return wire.Done(f"{member} leaves once other machines have its layers")
            case wire.AskRotate():
                kept, lost = coordinator.rotate()
                text = f"the coordinator has a new key, which {', '.join(kept) or 'no member'} has"
                return wire.Done(f"{text}; to join again with a new token: {', '.join(lost)}" if lost else text)
            case wire.AskReplan():
                replan()
                return wire.Done("the model is placed anew; `luce cluster status` shows it")
    except LuceError as error:
        return wire.Failed(str(error))
    except Exception as error:
        # The thread goes on with the next command.
        _log.exception("a command for the cluster failed")
        return wire.Failed(f"the command failed: {type(error).__name__}: {error}")
