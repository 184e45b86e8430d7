"""Connections over TCP: a peer whose machine is gone is noticed, whoever opened them. By the kernel's own word."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import free_port

ESTABLISHED = "01"
KEEPALIVE = "02"  # of /proc/net/tcp: a timer that is none of retransmission, TIME_WAIT or window probe


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """A deployment all of whose links are TCP, and connections of clients to its frontend and its status page."""
    ports = {name: free_port() for name in ("store", "data", "beat", "status")}
    worker = {
        "address": f"tcp://0.0.0.0:{ports['data']}",
        "beat_address": f"tcp://0.0.0.0:{ports['beat']}",
        "status_address": f"tcp://0.0.0.0:{ports['status']}",
        "advertise": "127.0.0.1",
    }
    deployment = Deployment(1, worker=worker)
    deployment.store = f"tcp://127.0.0.1:{ports['store']}"
    with deployment:
        ports["http"] = deployment.port
        clients = [http.client.HTTPConnection("127.0.0.1", ports[name], timeout=60) for name in ("http", "status")]
        for client in clients:
            client.request("GET", "/live")
            assert client.getresponse().read()
        yield ports
        for client in clients:
            client.close()


def ends(port: int) -> list[tuple[int, int, str]]:
    """Open connections with this port: local port, remote port, which timer runs."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, _, timer, *_ = line.split()
        pair = int(local.split(":")[1], 16), int(remote.split(":")[1], 16)
        if port in pair and state == ESTABLISHED:
            found.append((*pair, timer.split(":")[0]))
    return found


@pytest.mark.parametrize("name", ["store", "data", "beat"])
def test_both_ends_of_every_link_are_probed(ports: dict[str, int], name: str) -> None:
    """Between frontend, worker and store a silent connection is asked whether its peer's machine is there."""
    port = ports[name]
    served = {end[:2] for end in ends(port)}
    assert any(local == port for local, _ in served)
    assert any(remote == port for _, remote in served)
    assert _probed(port, served) == served


@pytest.mark.parametrize("name", ["http", "status"])
def test_clients_connections_are_probed(ports: dict[str, int], name: str) -> None:
    """A client or a scraper whose machine is gone does not hold its connection for ever."""
    port = ports[name]
    served = {end[:2] for end in ends(port) if end[0] == port}
    assert served
    assert _probed(port, served) == served


def _probed(port: int, wanted: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Of the connections, those seen with a keep-alive timer: what is under way hides it for a moment."""
    seen: set[tuple[int, int]] = set()
    for _ in range(2000):
        seen |= {end[:2] for end in ends(port) if end[2] == KEEPALIVE} & wanted
        if seen == wanted:
            break
    return seen
