"""Processes that decode columns for the tests, forked from one that has imported the libraries.

Each file of Parquet, Arrow or HDF5 is decoded by a process of its own, which imports numpy and a
library for most of its life. Here it is forked from a process with the same environment that has
done so, and then runs the same script with the same limits.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

__all__ = ["start"]

_PRELOADED = ("numpy", "pyarrow.parquet", "pyarrow.ipc", "pyarrow.feather", "h5py")


class Decoder:
    """What `_columns` asks of a process: its two ends, and to end."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._owner = os.getpid()

    def kill(self) -> None:
        """End it, unless it has been waited for."""
        if self.returncode is None and os.getpid() == self._owner:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it has ended and return how, as `subprocess.Popen.wait` does."""
        if os.getpid() != self._owner:
            return 0  # as of the child of another process
        if self.returncode is None:
            watched = os.pidfd_open(self.pid)
            try:
                select.select([watched], [], [])
            finally:
                os.close(watched)
            self.returncode = int(_ask({"wait": self.pid}))
        return self.returncode


_lock = threading.Lock()
_server: tuple[int, socket.socket, subprocess.Popen[bytes]] | None = None
"""The process that forks, and the process that started it."""


def _stop() -> None:
    if _server is not None and _server[0] == os.getpid():
        _server[1].close()
        _server[2].wait()


def _ask(request: dict[str, Any], fds: tuple[int, ...] = ()) -> Any:
    """Send a request to the process that forks, which is started first; return its answer."""
    global _server
    with _lock:
        if _server is None or _server[0] != os.getpid():
            from tierstore._formats import _columns

            ours, theirs = socket.socketpair()
            forking = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), str(_columns._CHILD)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_columns._ENVIRONMENT},
            )
            theirs.close()
            _server = os.getpid(), ours, forking
            atexit.register(_stop)
        socket.send_fds(_server[1], [json.dumps(request).encode()], fds)
        return json.loads(_server[1].recv(1 << 12))


def start(kind: str, path: Path, nbytes: int) -> tuple[Decoder, socket.socket]:
    """Start a process that reads files; stands for `_columns._child`."""
    ours, theirs = socket.socketpair()
    (its_input, written), (read, its_output) = os.pipe(), os.pipe()
    theirs_of_it = (its_input, its_output, theirs.fileno())
    try:
        pid = _ask({"kind": kind, "nbytes": nbytes}, theirs_of_it)
    finally:
        for fd in theirs_of_it[:2]:
            os.close(fd)
        theirs.close()
    return Decoder(pid, os.fdopen(written, "wb"), os.fdopen(read, "rb")), ours


def _serve(channel: socket.socket, script: str) -> None:
    """Fork a process for each request until the other end is closed."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("columns_child", script)
    assert spec is not None
    assert spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 12, 3)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            channel.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            _decode(child, channel, fds, request)
        for fd in fds:
            os.close(fd)
        channel.send(json.dumps(pid).encode())


def _decode(child: Any, channel: socket.socket, fds: list[int], request: dict[str, Any]) -> None:
    """Be the script, with the given standard streams and socket."""
    code = 1
    try:
        channel.close()
        os.dup2(fds[0], 0)
        os.dup2(fds[1], 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.argv = ["columns_child", request["kind"], str(fds[2]), str(request["nbytes"])]
        for fd in fds[:2]:
            os.close(fd)
        child.main()
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
