"""A manifest's deployment kept on one machine, over tiny processes: how it begins, and what it goes on with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.core.errors import UserError
from holdfast.core.tasks import beside
from holdfast.discovery.keys import ROLLOUT_STATUS
from holdfast.roles import rolled
from holdfast.roles.rolled import Rolled
from holdfast.rollout.records import RolloutStatus, change_desired, deleted, encode_status, read_desired
from tests.rigs.supervise.rollouts import WAIT_S, Site, place, text

pytestmark = pytest.mark.alone


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with place(tmp_path) as made:
        yield made


class Run:
    """One supervisor's life with a manifest."""

    def __init__(self, site: Site, manifest: str, *, own_store: bool = False) -> None:
        folder = site.world.state_dir
        store = "" if own_store else f"unix://{folder}/s"
        where = rolled.Site(
            state_dir=str(folder), manifest=manifest, environ={"HOME": "/"}, store=store, wait_s=WAIT_S
        )
        self.kept = Rolled.decoded(Rolled(where).encoded())
        self.world = site.world
        self.told: list[str] = []
        self.shown: list[str] = []

    @contextlib.asynccontextmanager
    async def begun(self) -> AsyncIterator[asyncio.Task[None]]:
        """Until the body ends; then it is as if it had been killed."""
        supervisor = self.world.supervisor(*self.kept.jobs())
        work = self.kept.run(supervisor, tied=False, shown=self._show, tell=self.told.append)
        async with beside(work, "kept") as task:
            yield task
        self.world.lose(supervisor)

    async def _show(self, lack: str) -> None:
        self.shown.append(lack)

    async def until_shown(self, task: asyncio.Task[None]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.shown:
                assert not task.done(), task
                await asyncio.sleep(0.02)


async def test_what_the_store_holds_goes_on_whatever_the_file_says(site: Site) -> None:
    """The first file begins it. Another one later changes nothing, and is told of; the same one says nothing."""
    first = Run(site, text("one"))
    async with first.begun() as task:
        await first.until_shown(task)
    assert first.shown == [""]
    names = {job.name for job in first.kept.jobs()}
    assert sum(name.startswith("chat-frontend-") for name in names) == 2, names
    for manifest, differs in ((text("two"), True), (f"# {text('one')}", False), (text("one", 3), True)):
        again = Run(site, manifest)
        assert {job.name for job in again.kept.jobs()} == names
        async with again.begun() as task:
            await again.until_shown(task)
        assert again.shown == [""]
        goes_on = "chat goes on with revision 1, which the store holds; the file differs"
        assert any(goes_on in line for line in again.told) is differs, again.told
        held = await read_desired(site.store, "chat")
        assert held is not None
        assert (held.revision, held.manifest) == (1, text("one"))


async def test_a_first_manifest_that_was_wrong_can_be_mended(site: Site) -> None:
    """It is given up, and says why; the next file is the next revision, because none was ever in place."""
    bad = Run(site, text("BAD"))
    async with bad.begun() as task:
        with pytest.raises(UserError, match=r"revision 1 is stuck: Frontend-[12] crashed \d times in a row"):
            await asyncio.wait_for(task, WAIT_S)
    assert bad.shown == []
    good = Run(site, text("one"))
    async with good.begun() as task:
        await good.until_shown(task)
        held = await read_desired(site.store, "chat")
        assert held is not None
        assert held.revision == 2


async def test_a_store_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    """Soon, and why: nobody waits for hours for a store whose file is broken."""
    folder = tmp_path / "BAD"  # where every process ends at once
    folder.mkdir()
    async with place(folder) as site:
        run = Run(site, text("one"), own_store=True)
        async with run.begun() as task:
            with pytest.raises(UserError, match="store cannot be started: exited with 7: no such thing"):
                await asyncio.wait_for(task, WAIT_S)
        assert run.shown == []


async def test_what_another_carries_out_is_left_to_it(site: Site) -> None:
    """Elsewhere, as the store knows it: nothing is asked for, and it is named."""
    elsewhere = RolloutStatus(pid=7, host="there", state_dir="/there")
    held = site.another.register(ROLLOUT_STATUS + "chat", encode_status(elsewhere))
    while await site.store.get(ROLLOUT_STATUS + "chat", WAIT_S) is None:
        await asyncio.sleep(0.01)
    second = Run(site, text("one"))
    async with second.begun() as task:
        with pytest.raises(UserError, match="chat is carried out by pid 7 on there, in /there; change it with"):
            await asyncio.wait_for(task, WAIT_S)
    assert await read_desired(site.store, "chat") is None
    await held.withdraw()


async def test_when_it_was_deleted_nothing_of_it_is_left(site: Site) -> None:
    """The supervisor ends by itself. No key of the deployment is in the store, and no log, lock or journal on disk;
    what is another deployment's stays."""
    folder = site.world.state_dir
    run = Run(site, text("one"))
    async with run.begun() as task:
        await run.until_shown(task)
        for name in ("chat", "chat-2"):
            for key in (f"health/{name}-0123abcd/worker/generate/1", f"expected/{name}/k", f"level/{name}"):
                await site.store.put(f"v1/{key}", b"{}", WAIT_S)
        journal = folder / "run" / "journals" / "chat-worker-0123abcd-7"
        journal.mkdir(parents=True)
        (folder / "run" / "chat-worker-0123abcd-7.lock").touch()
        (folder / "logs" / "another.log").touch()
        assert len(list((folder / "logs").glob("chat-*"))) >= 3, "two frontends and a control"
        await change_desired(site.store, "chat", deleted("chat", 2.0))
        await asyncio.wait_for(task, WAIT_S)
    assert run.told[-1] == "chat was deleted, and is gone"
    left = await site.keys()
    assert all("chat-2" in key for key in left), left
    assert len(left) == 3
    assert not list(folder.glob("**/chat-*")), "logs, locks, journals, sockets"
    assert (folder / "logs" / "another.log").exists()
