"""Frontends share a port with others of their deployment, and with nobody else."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.core.procfs import listens
from holdfast.roles import ports
from holdfast.roles.ports import await_port
from holdfast.spec.launch import FrontendLaunch
from holdfast.supervise.records import Record, write_record
from holdfast.testing.rig import free_port

LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=True):
    print("listens", flush=True)
    sys.stdin.read()
"""


class Another:
    """A process that listens on a port which others may share."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-c", LISTENS, str(self.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"listens\n"

    def write_down(self, folder: Path, role: str = "frontend", deployment: str = "") -> None:
        record = Record.of_process(self.process.pid, "another", role, deployment=deployment)
        write_record(folder, record)

    def launch(self, folder: Path) -> FrontendLaunch:
        address = f"tcp://127.0.0.1:{self.port}"
        return FrontendLaunch(state_dir=str(folder), name="one", deployment="chat", address=address)


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> Iterator[Another]:
    monkeypatch.setattr(ports, "LOOKS", 2)
    made = Another()
    yield made
    made.process.communicate(b"")


@pytest.mark.parametrize(
    ("role", "deployment", "may"),
    [
        ("frontend", "chat", True),
        ("frontend", "", True),  # it starts, and has not said so
        ("frontend", "chat-more", False),
        ("worker", "", False),
        ("", "", False),  # a stranger
    ],
)
async def test_a_port_is_shared_with_its_own_only(
    another: Another, tmp_path: Path, role: str, deployment: str, may: bool
) -> None:
    """By what is written of the process that listens there; who is not known is a stranger."""
    if role:
        another.write_down(tmp_path, role, deployment)
    if may:
        await await_port(another.launch(tmp_path))
        return
    with pytest.raises(UserError, match=f":{another.port} is in use by another than chat; "):
        await await_port(another.launch(tmp_path))


async def test_a_free_port_is_anybodys(another: Another, tmp_path: Path) -> None:
    """Also one that was a stranger's until now."""
    another.process.communicate(b"")
    await await_port(another.launch(tmp_path))


def test_who_listens_is_told_by_the_kernel(another: Another) -> None:
    """The process itself, on that port, and not one that only talks to it."""
    pid, port = another.process.pid, another.port
    with socket.create_connection(("127.0.0.1", port)):
        assert listens(pid, port)
        assert not listens(pid, port + 1)
        assert not any(listens(other, port) for other in (0, 2**22 + 1))
