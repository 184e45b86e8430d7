"""A real Redis's process, with nothing on disk but what it is told to keep."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.redis_stream import STREAM
from holdfast.testing.waiting import BOUND_S, wait_until

redis = pytest.importorskip("redis", reason="the redis client is not here: it comes with the extras [redis] and [dev]")


def redis_server() -> str:
    """The one of `make redis`, or this machine's; without any the test is skipped, but not where CI runs."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if (found := shutil.which("redis-server", path=path)) is None:
        why = "redis-server is not here: `make redis` fetches it, `apt-get install redis-server` installs it"
        if os.environ.get("HOLDFAST_TEST_ALL_TOOLS"):
            pytest.fail(why)
        pytest.skip(why)
    return found


class Redis:
    """Listens on a socket in its folder. `keeps`: it writes down what it is told before it answers."""

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        socket = folder / "redis.sock"
        self.url = f"unix://{socket}"
        said = {"port": "0", "unixsocket": str(socket), "dir": str(folder), "save": ""}
        said |= {"appendonly": "yes", "appendfsync": "always"} if keeps else {}
        self._command = [redis_server(), *(word for name, value in said.items() for word in (f"--{name}", value))]
        self._client = redis.Redis(unix_socket_path=str(socket), decode_responses=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, "Redis", BOUND_S)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self._client.ping())
        return False

    def send(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait(BOUND_S)
            self._process = None

    def say(self, *words: Any) -> Any:
        return self._client.execute_command(*words)

    def entries(self) -> list[dict[str, Any]]:
        """All that the stream has, oldest first."""
        return [{**entry, "data": json.loads(entry["data"])} for _, entry in self._client.xrange(STREAM)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Redis]:
    started = Redis(tmp_path)
    started.start()
    try:
        yield started
    finally:
        started.kill()
