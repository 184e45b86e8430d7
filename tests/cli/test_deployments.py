"""The commands that change a deployment while it runs, on a real store and real rollouts of tiny processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.cli.deployments import book, waiting
from holdfast.rollout.records import read_desired
from holdfast.rollout.status import RolloutReport, RolloutResult, ServiceStatus
from holdfast.supervise.lock import Holder, sign, take_lock
from holdfast.testing.waiting import until
from tests.rigs.cli.in_process import patient, said_here
from tests.rigs.supervise.rollouts import Site, place, text

pytestmark = pytest.mark.alone
KIND = "dynamographdeployment.nvidia.com"


class Told(subprocess.CompletedProcess[str]):
    """What a command said, and how it ended."""

    def __repr__(self) -> str:
        return f"status {self.returncode}\n{self.stdout}{self.stderr}"


class Desk:
    """A terminal beside a deployment of tiny processes."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.folder = site, folder
        self.file = folder / "m.yaml"
        self.env = {"PATH": os.environ["PATH"], "HOME": str(folder), "HOLDFAST_STATE_DIR": str(folder)}

    async def say(self, *words: str, manifest: str = "") -> Told:
        if manifest:
            self.file.write_text(manifest)
            words = (*words, "-f", str(self.file))
        return await asyncio.to_thread(self._say, words)

    def _say(self, words: tuple[str, ...]) -> Told:
        done = said_here(words, self.env)
        return Told(words, done.returncode, done.stdout, done.stderr)

    async def pipe(self, text: str, *words: str) -> subprocess.CompletedProcess[bytes]:
        """With this on its standard input."""
        how = {"input": text.encode(), "capture_output": True, "timeout": 60.0, "env": self.env}
        return await asyncio.to_thread(subprocess.run, [sys.executable, "-m", "holdfast", *words], **how)

    async def apply(self, manifest: str, *words: str) -> Told:
        return await self.say("apply", *words, manifest=manifest)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """Its lock says which store it keeps, as a supervisor's does."""
    async with place(tmp_path) as site:
        lock = take_lock(tmp_path)
        assert lock is not None
        sign(lock, Holder(os.getpid(), up=True, deployment="chat", store=f"unix://{tmp_path}/s"))
        with patient():
            yield Desk(site, tmp_path)
        os.close(lock)


@contextlib.asynccontextmanager
async def first_revision(desk: Desk) -> AsyncIterator[None]:
    async with desk.site.carried_out() as rolling:
        await desk.site.apply(text("one"))
        await desk.site.in_place(rolling, 1)
        await desk.site.until(lambda: rolling.status.report and rolling.status.report.is_done, "it to be told")
        yield


async def test_a_change_is_applied_and_waited_for(desk: Desk) -> None:
    """Dry it changes nothing; then it says what it did, and with --wait ends when that is in place."""
    async with first_revision(desk):
        shown = json.loads((await desk.apply(text("two"), "--dry-run", "-o", "json")).stdout)
        assert (shown["status"]["revision"], shown["status"]["state"]) == (2, "rolling out"), "not in place"
        dry = await desk.apply(text("two"), "--dry-run")
        assert (dry.returncode, dry.stdout) == (0, f"{KIND}/chat configured (dry run)\n"), dry
        held = await read_desired(desk.site.store, "chat")
        assert held is not None
        assert held.revision == 1
        same = await desk.apply(text("one"))
        assert (same.returncode, same.stdout) == (0, f"{KIND}/chat unchanged\n"), same
        remark = await desk.apply(f"# a remark\n{text('one')}")
        assert (remark.returncode, remark.stdout) == (0, f"{KIND}/chat unchanged\n"), remark
        done = await desk.apply(text("two"), "--wait", "--timeout", "1m30s")
        assert done.returncode == 0, done
        assert done.stdout.startswith(f"{KIND}/chat configured\n")
        assert done.stdout.endswith("chat: revision 2 is in place: Frontend 2 of 2\n"), done
        more = await desk.apply(text("two", 3), "--wait", "-o", "json")
        assert more.returncode == 0, more
        assert json.loads(more.stdout)["status"]["revision"] == 2, "how many there are is no part of a revision"
        assert "Frontend 3 of 3" in more.stderr


async def test_what_is_bad_is_told_by_who_waits(desk: Desk) -> None:
    """Why it was undone, with status 1; the history has it, and it is not undone twice."""
    async with first_revision(desk):
        bad = await desk.apply(text("BAD"), "--wait")
        assert bad.returncode == 1, bad
        assert "revision 2 was undone: " in bad.stderr
        assert "times in a row: " in bad.stderr
        status = await desk.say("rollout", "status")
        assert (status.returncode, status.stdout) == (1, ""), status
        assert "revision 2 was undone: " in status.stderr
        history = await desk.say("rollout", "history", "chat")
        assert [line.split()[0] for line in history.stdout.splitlines()] == ["revision", "1", "2"], history
        assert "undone: Frontend-3 crashed" in history.stdout
        again = await desk.say("rollout", "undo")
        assert again.returncode == 1
        assert "revision 2 is undone already" in again.stderr


async def test_a_difference_is_a_status(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 nothing, 1 something, more where it cannot be told; as a patch, and who would be replaced."""
    async with first_revision(desk):
        same = await desk.say("diff", manifest=f"# the same in other words\n{text('one')}")
        assert (same.returncode, same.stdout) == (0, ""), same
        other = await desk.say("diff", manifest=text("two", 3))
        assert other.returncode == 1, other
        changed = [line for line in other.stdout.splitlines() if line.startswith(("+ ", "- "))]
        assert [line.split()[0] + line.split()[-1] for line in changed] == ["-one", "-2", "+two", "+3"], other
        assert other.stderr.startswith("Frontend: 2 of "), other
        new = await desk.say("diff", manifest=text("one").replace("name: chat", "name: talk"))
        assert new.returncode == 1
        wrong = await desk.say("diff", manifest="kind: [")
        assert wrong.returncode > 1
    monkeypatch.setattr(book, "ANSWER_S", 0.1)
    away = await desk.say("diff", "--store", f"unix://{desk.folder}/none", manifest=text("two"))
    assert away.returncode == 2, away
    assert "no answer within" in away.stderr


async def test_what_there_is_can_be_read_and_applied_again(desk: Desk) -> None:
    """As a table, by name, as JSON and as YAML; what is written is what was asked for."""
    async with first_revision(desk):
        table = (await desk.say("get")).stdout.splitlines()
        assert table[0].split() == ["name", "revision", "status", "ready", "age"]
        assert table[1].split()[:5] == ["chat", "1", "in", "place", "2/2"]
        assert (await desk.say("get", "-o", "name")).stdout == f"{KIND}/chat\n"
        shown = json.loads((await desk.say("get", "chat", "-o", "json")).stdout)
        assert shown["spec"]["services"]["Frontend"]["replicas"] == 2
        assert shown["status"]["state"] == "in place"
        assert json.loads((await desk.say("get", "-o", "json")).stdout)["items"] == [shown]
        yaml = await desk.say("get", f"{KIND}/chat", "-o", "yaml")
        assert yaml.returncode == 0, yaml
        written = yaml.stdout
        assert (await desk.say("diff", manifest=written.partition("status:")[0])).returncode == 0
        again = await desk.pipe(written, "apply", "-f", "-", "--dry-run")
        assert again.stdout == f"{KIND}/chat unchanged (dry run)\n".encode(), again
        assert b"standard input: warning: line " in again.stderr, "its status does nothing"
        assert (await desk.say("get", "dgd", "-o", "name")).stdout == f"{KIND}/chat\n"
        for words in (("dgd", "chat"), ("dgd/chat",), ("DynamoGraphDeployments", "chat")):
            assert (await desk.say("get", *words, "-o", "name")).stdout == f"{KIND}/chat\n", words
        assert "`holdfast status` shows" in (await desk.say("get", "pods")).stderr
        wrong = await desk.say("get", "chatt")
        assert (wrong.returncode, wrong.stderr) == (1, "holdfast: there is no deployment 'chatt'; did you mean chat?\n")


async def test_it_is_paused_resumed_and_undone(desk: Desk) -> None:
    """Each says what it did, and what cannot be; whose time is over is told that it goes on."""
    async with first_revision(desk):
        assert (await desk.say("rollout", "pause")).stdout == f"{KIND}/chat paused\n"
        assert (await desk.say("rollout", "pause")).returncode == 1
        await desk.apply(text("one").replace("progressDeadlineSeconds: 400", "paused: true"))
        for _ in range(2):  # by a person's word, and then by the manifest alone
            stays = await desk.say("rollout", "resume")
            assert stays.returncode == 1, stays
            assert "Frontend of chat stays paused by its manifest (rollout.paused): change it there" in stays.stderr
        assert (await desk.apply(text("one"), "--wait")).returncode == 0  # of the same sets, so still revision 1
        rules = await desk.say("rollout", "undo")
        assert rules.returncode == 1, rules
        assert "the last change (apply) replaced no replica" in rules.stderr
        assert (await desk.say("rollout", "pause")).returncode == 0
        waited = await desk.apply(text("two"), "--wait", "--timeout", "0.5s")
        assert waited.returncode == 1, waited
        assert "timed out after 0.5 s; it continues in the background" in waited.stderr

        async def is_paused() -> bool:
            return "revision 2 is paused" in (await desk.say("rollout", "status", "--no-watch")).stdout

        await until(is_paused, "the supervisor to have read it")
        assert (await desk.say("rollout", "resume", "chat")).stdout == f"{KIND}/chat resumed\n"
        done = await desk.say("rollout", "status")
        assert done.returncode == 0, done
        undone = await desk.say("rollout", "undo", "--wait")
        assert undone.returncode == 0, undone
        assert undone.stdout.startswith(f"{KIND}/chat rolled back to revision 1, as revision 3\n"), undone
        assert text("two") == (await desk.say("rollout", "history", "--revision", "2")).stdout
        kept = await desk.say("rollout", "undo", "--to-revision", "9")
        assert "revision 9 is not kept; there are 1, 2, 3" in kept.stderr


async def test_a_revision_whose_manifest_pauses_it_is_not_gone_back_to(desk: Desk) -> None:
    """It would not begin; the command says so, and what to do."""
    async with first_revision(desk):
        paused = text("two").replace("progressDeadlineSeconds: 400", "paused: true")
        assert (await desk.apply(paused)).returncode == 0
        assert (await desk.apply(text("one"), "--wait")).returncode == 0
        back = await desk.say("rollout", "undo", "--to-revision", "2")
        assert back.returncode == 1, back
        assert "revision 2 would not begin: its manifest pauses Frontend (rollout.paused); apply" in back.stderr


async def test_a_service_is_scaled_and_the_last_change_taken_back(desk: Desk) -> None:
    """Its number changes and no revision begins; an undo takes the number back, also while it is paused; an undo of a
    revision leaves the numbers as they are, and says so."""
    async with first_revision(desk):
        more = await desk.say("scale", "chat/Frontend", "3", "--wait")
        assert more.returncode == 0, more
        assert more.stdout.startswith(f"{KIND}/chat: Frontend scaled from 2 to 3\n"), more
        assert more.stdout.endswith("chat: revision 1 is in place: Frontend 3 of 3\n"), more
        assert (await desk.apply(text("one"))).stdout == f"{KIND}/chat unchanged\n"
        assert json.loads((await desk.say("get", "chat", "-o", "json")).stdout)["status"]["scaled"] == {"Frontend": 3}
        assert "Frontend: stays scaled to 3" in (await desk.say("diff", manifest=text("one"))).stderr
        assert (await desk.say("rollout", "pause")).returncode == 0
        dry = await desk.say("rollout", "undo", "--dry-run")
        took = f"{KIND}/chat scaled back to 2 Frontend from 3 Frontend (undoing: scale), and resumed"
        assert dry.stdout == f"{took} (dry run)\n", dry
        back = await desk.say("rollout", "undo", "--wait")
        assert back.stdout.startswith(f"{took}\n"), back
        assert back.stdout.endswith("chat: revision 1 is in place: Frontend 2 of 2\n"), back
        assert (await desk.apply(text("two"), "--wait")).returncode == 0
        said = json.loads((await desk.say("scale", "chat/Frontend", "1", "--wait", "--json")).stdout)
        assert (said["before"], said["replicas"], said["revision"]) == (2, 1, 2), said
        undone = await desk.say("rollout", "undo", "--to-revision", "1", "--wait")
        told = f"{KIND}/chat rolled back to revision 1 with 1 Frontend as now, as revision 3\n"
        assert undone.stdout.startswith(told), undone
        assert undone.stdout.endswith("chat: revision 3 is in place: Frontend 1 of 1\n"), undone


async def test_what_cannot_be_scaled_is_told(desk: Desk) -> None:
    """Which service is not there, or which of them was meant; and nothing is changed."""
    async with first_revision(desk):
        for words, told in (
            (("chat/Frontent", "3"), "chat has no service 'Frontent'; did you mean Frontend?"),
            (("chat", "3"), "which service of chat? There are chat/Frontend"),
            (("chatt/Frontend", "3"), "there is no deployment 'chatt' of a manifest; there is chat/SERVICE"),
            (("Frontend", "3"), "there is no deployment 'Frontend' of a manifest; there is chat/SERVICE"),
        ):
            refused = await desk.say("scale", *words)
            assert refused.returncode == 1, refused
            assert told in refused.stderr, refused
        assert (await desk.say("scale", "chat/Frontend", "-1")).returncode == 78
        held = await read_desired(desk.site.store, "chat")
        assert held is not None
        assert (held.serial, held.scaled) == (1, {})


async def test_an_undo_of_more_replicas_takes_them_away_also_while_it_is_paused(desk: Desk) -> None:
    """The last change was a number, so no revision of long ago is gone back to; a pause does not keep an undo from
    taking effect."""
    async with desk.site.carried_out() as rolling:
        for number, version in enumerate(("one", "worse", "one"), 1):
            await desk.site.apply(text(version, 1))
            await desk.site.in_place(rolling, number)
        assert (await desk.apply(text("one", 2), "--wait")).returncode == 0
        history = (await desk.say("rollout", "history")).stdout.splitlines()
        assert [line.split()[0] for line in history[1:]] == ["1", "2", "3"], history
        assert (await desk.say("rollout", "pause")).returncode == 0
        undone = await desk.say("rollout", "undo", "--wait")
        assert undone.returncode == 0, undone
        took = "scaled back to 1 Frontend from 2 Frontend (undoing: apply), and resumed"
        assert undone.stdout.startswith(f"{KIND}/chat {took}\n"), undone
        assert "revision 3 is in place: Frontend 1 of 1" in undone.stdout
        held = await read_desired(desk.site.store, "chat")
        assert held is not None
        assert (held.replicas, held.paused) == ({"Frontend": 1}, False)


async def test_no_replicas_are_warned_of(desk: Desk) -> None:
    """A service that nothing answers for is accepted, and told."""
    async with first_revision(desk):
        told = await desk.apply(text("one", 0), "--dry-run")
        assert (told.returncode, told.stdout) == (0, f"{KIND}/chat configured (dry run)\n"), told
        assert "spec.services.Frontend.replicas" in told.stderr
        assert "with 0 replicas of it no request is answered" in told.stderr


async def test_what_the_store_cannot_write_down_may_be_asked_for_all_the_same(desk: Desk) -> None:
    """Whoever asked is told so, and where to look: it is heard before it is on the disk."""
    async with first_revision(desk):
        (desk.folder / "durable.new").mkdir()  # where it writes
        told = await desk.say("rollout", "pause")
        assert told.returncode == 1, told
        assert "whether chat was changed is not known, and `holdfast get chat` shows it: " in told.stderr
        assert "the store could not write its file" in told.stderr


async def test_it_is_deleted(desk: Desk) -> None:
    """Whoever waits is told when nothing is left; what is not there is an error, unless that is meant."""
    async with first_revision(desk):
        assert (await desk.say("delete", "talk")).returncode == 1
        assert (await desk.say("delete", "talk", "--ignore-not-found=true")).returncode == 0
        assert (await desk.say("delete", "dgd")).returncode == 2, "that is no name"
        assert (await desk.say("delete", "pod/chat")).returncode == 2, "and that is no deployment"
        assert (await desk.say("delete", "chat", "--timeout", "soon")).returncode == 2
        assert (await desk.say("delete", "dgd", "chat", "--dry-run=client")).stdout.endswith(" deleted (dry run)\n")
        gone = await desk.say("delete", manifest=text("one"))
        assert (gone.returncode, gone.stdout.splitlines()[0]) == (0, f"{KIND}/chat deleted"), gone
        assert gone.stdout.endswith("chat: it is gone\n")
        assert "there are no deployments" in (await desk.say("get")).stdout


def test_what_is_left_of_one_that_is_being_deleted_is_told() -> None:
    """By service, with what each of them waits for."""
    services = (ServiceStatus("Frontend", 0, 0, 0, 2), ServiceStatus("Worker", 0, 0, 0, 1, "its streams"))
    report = RolloutReport(RolloutResult.UNDER_WAY, 1, "", (*services, ServiceStatus("Planner", 0, 0, 0, 0)))
    assert waiting._left(report) == "being deleted; 2 Frontend left; 1 Worker left; its streams"


async def test_what_is_applied_while_it_is_deleted_is_refused(desk: Desk) -> None:
    """Nothing is accepted that would be lost with the deployment; the deletion goes on."""
    async with first_revision(desk):
        assert (await desk.say("delete", "chat", "--no-wait")).returncode == 0
        late = await desk.apply(text("two"))
        assert late.returncode == 1, late
        gone = ("it is being deleted", "no supervisor here runs", "was deleted meanwhile")  # by how far it is
        assert any(how in late.stderr for how in gone), late
        await desk.site.until(desk.site.task.done, "the deletion")
        assert await read_desired(desk.site.store, "chat") is None


async def test_a_store_that_is_back_is_not_said_to_have_nobody(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that comes when the store was just started again, and its supervisor has not found it yet, waits for
    that: it does not end with a failure that is none."""
    monkeypatch.setattr(book, "FOUND_S", 60.0)
    async with first_revision(desk):
        pass
    said = asyncio.create_task(desk.say("rollout", "status"))
    async with desk.site.carried_out():
        told = await said
    assert told.returncode == 0, told
    assert told.stdout.endswith("chat: revision 1 is in place: Frontend 2 of 2\n"), told


async def test_nobody_is_asked_who_is_not_there(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody would carry out is not asked for, and says who would; looking says it as well."""
    monkeypatch.setattr(book, "FOUND_S", 0.01)
    async with first_revision(desk):
        other = await desk.apply(text("one").replace("name: chat", "name: talk"))
        assert other.returncode == 1
        assert "no supervisor here runs a deployment 'talk' (there is chat); start one with " in other.stderr
    for words in (("apply", "-f", str(desk.file)), ("rollout", "pause"), ("rollout", "status")):
        desk.file.write_text(text("two"))
        told = await desk.say(*words)
        assert told.returncode == 1, told
        assert "no supervisor runs chat: `holdfast up -f FILE` continues it" in told.stderr, told
    assert "not carried out" in (await desk.say("get")).stdout


async def test_what_nobody_carries_out_is_deleted_once_nothing_of_it_runs(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one of its processes runs that is refused, and says how it is done; then nothing is left of it."""
    monkeypatch.setattr(book, "FOUND_S", 0.01)
    async with first_revision(desk):
        pass
    left = desk.site.store.register("v1/controls/chat/c-1", b"{}")
    await until(lambda: left.registered, "a process of it")
    told = await desk.say("delete", "chat")
    assert told.returncode == 1, told
    assert "no supervisor runs chat" in told.stderr
    assert "1 of its processes run; `holdfast down` stops them" in told.stderr
    await left.withdraw()
    gone = await desk.say("delete", "chat")
    assert (gone.returncode, gone.stdout) == (0, f"{KIND}/chat deleted\nchat: it is gone\n"), gone
    assert await read_desired(desk.site.store, "chat") is None
    assert await desk.site.history() == {}


async def test_who_stops_waiting_stops_nothing_else(desk: Desk) -> None:
    """Ctrl-C ends the wait with status 130, and says that the rollout goes on; it does."""
    async with desk.site.carried_out() as rolling:
        await desk.site.apply(text("one"))
        await desk.site.in_place(rolling, 1)
        await desk.say("rollout", "pause")
        await desk.site.apply(text("two"))
        command = [sys.executable, "-m", "holdfast", "rollout", "status"]
        waits = await asyncio.create_subprocess_exec(*command, env=desk.env, stdout=subprocess.PIPE)
        assert waits.stdout is not None
        said = b""
        async with asyncio.timeout(60.0):
            while b"revision 2 is paused" not in said:
                said += await waits.stdout.readline()
            waits.send_signal(signal.SIGINT)
            said += await waits.stdout.read()
            assert await waits.wait() == 130, said
        assert b"it continues in the background: `holdfast rollout status chat`" in said
        await desk.say("rollout", "resume")
        await desk.site.in_place(rolling, 2)


async def test_every_mistake_of_a_manifest_is_told(desk: Desk) -> None:
    """With its line, its path and the mend, and nothing is done."""
    wrong = text("one").replace("replicas: 2", 'replicas: "2"').replace("envs:", "env:")
    told = await desk.apply(wrong)
    assert told.returncode == 78
    assert [line.partition(": line ")[2][:2] for line in told.stderr.splitlines()] == ["9:", "10", ""], told
    assert told.stderr.endswith("cannot be used: 2 mistakes\n")
