"""A process's name is its own: claimed before anything is called by it."""

from __future__ import annotations

import os
import re
import signal
import socket

from up_rig import Place, until

from holdfast.supervise.records import read_records
from holdfast.testing.place import free_port


def names(place: Place, role: str) -> dict[str, int]:
    return {record.name: record.pid for record in read_records(place.state_dir) if record.role == role and record.alive}


def test_processes_started_at_once_without_a_name_have_one_each(place: Place) -> None:
    """Three workers and two frontends in the same moment: five names, five processes that are ready; a name that was
    chosen and is taken is refused with the address where its process really is, and one whose process was killed is
    free again."""
    place.begin("store")
    port = str(free_port())
    workers = [place.begin("worker") for _ in range(3)]
    frontends = [place.begin("frontend", "--port", port) for _ in range(2)]
    until(lambda: len(names(place, "worker")) == 3, "three workers")
    until(lambda: len(names(place, "frontend")) == 2, "two frontends")
    assert names(place, "worker") == {f"worker-{n}": names(place, "worker")[f"worker-{n}"] for n in (1, 2, 3)}
    assert set(names(place, "worker").values()) == {process.pid for process in workers}
    assert set(names(place, "frontend").values()) == {process.pid for process in frontends}

    record = place.record("worker-1")
    refused = place.run("worker", "--name", "worker-1")
    assert refused.returncode == 1
    said = " ".join(refused.stderr.split())
    assert f"pid {record['pid']} runs at {record['address']}" in said
    assert "choose another --name" in said
    assert "Traceback" not in refused.stderr

    os.kill(record["pid"], signal.SIGKILL)
    next(one for one in workers if one.pid == record["pid"]).wait(10)
    place.begin("worker", "--name", "worker-1")
    until(lambda: place.back("worker-1", record["pid"]), "another process of that name")


def test_what_cannot_listen_names_the_address_that_is_taken(place: Place) -> None:
    """The status page's port is in use: that is the address in the error, not the one for frontends."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        done = place.run("worker", "--status-address", where)
    assert done.returncode == 1
    assert re.search(rf"{where} is in use", done.stderr), done.stderr
