"""The pool's fence where the vault and its engines are in sibling PID namespaces, as containers of one pod are: the
vault holds their pidfds and cannot look at the processes behind them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import pytest

from holdfast.testing.waiting import wait_until
from tests.rigs.memory.vaults import AGENT, SOON_MS, Engine, Rig

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# With a /proc of its own: without one the kernel shows the pids of the namespace that /proc was mounted for.
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
END_S = 60.0


@cache
def why_not() -> str:
    """Return why a PID namespace cannot be made here; empty: it can."""
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=END_S, check=False)
    except OSError as error:
        return f"unshare: {error}"
    return "" if tried.returncode == 0 else f"no PID namespace can be made here: {tried.stderr.strip()}"


class Apart(Rig):
    """A vault in a PID namespace of its own."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="vault-"))
        self.log = self.directory / "log"
        self.vaults = {}

    def __enter__(self) -> Apart:
        words = ("-m", "holdfast", "memory", "serve", "--socket-dir", str(self.directory), "--device", "host-0")
        with self.log.open("wb") as log:
            self._serving = subprocess.Popen([*UNSHARE, sys.executable, *words], stdout=log, stderr=log)
        wait_until(Path(self.path()).exists, "the vault's socket")
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.kill()  # and by --kill-child the first process of the namespace, and by that all of it
        self._serving.wait(END_S)
        super().__exit__()

    @contextlib.asynccontextmanager
    async def engine(self, engine_id: int = 0) -> AsyncIterator[Engine]:
        """An engine in a namespace of its own too."""
        engine = Engine(str(AGENT), str(self.directory), str(engine_id), under=UNSHARE)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.kill()


@pytest.fixture
def apart() -> Iterator[Apart]:
    if why := why_not():
        print(why)
        pytest.skip(why)
    with Apart() as started:
        yield started


async def test_owner_in_a_sibling_namespace_keeps_the_fence_closed_while_it_lives(apart: Apart) -> None:
    """Its connection ends and it runs on: it stays a mapper, comes back to its pool, and only its death lets another
    one in."""
    async with apart.engine(0) as owner, apart.engine(1) as second:
        await owner.owns_the_pool()
        await second.do("open")
        granted = second.order("own", epoch=11, timeout_ms=SOON_MS)
        await apart.shows(waiting=1)
        await owner.do("break_off", how="hung_up")
        await owner.back()
        await apart.shows(pool="OWNED(10)")
        assert not granted.done()
        assert await owner.do("pool_text") == "pages"
        await owner.kill()
        assert await granted is True
        await second.fenced()
        assert await second.do("map_pool") == "pages"
