"""What a new leader may run into, with `holdfast up` and open streams: real processes, real faults, exact answers.

One deployment for all; each test begins with a pair and leaves one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import uvloop

from holdfast.failover.journal import Term, two_leaders
from holdfast.supervise.incidents import read_incidents
from holdfast.testing.answers import Answer
from holdfast.testing.processes import children_of, kill_group
from holdfast.testing.rig import EngineSeen
from holdfast.testing.supervised import Supervised
from holdfast.testing.waiting import in_thread
from holdfast.testing.workload import Workload, compare, hit_in_the_middle, run_streams
from tests.rigs.failover_worker import ask

pytestmark = [pytest.mark.alone, pytest.mark.processes, pytest.mark.timeout(300)]

WAKE_S = 2.0
LOAD = Workload(streams=4, tokens=200)


@pytest.fixture(scope="module")
def pair() -> Iterator[Supervised]:
    with Supervised("--vault-gib", "0.0625", "--sim-tpot-ms", "10", "--wake-s", str(WAKE_S)) as started:
        yield started


@pytest.fixture(scope="module")
def unbroken(pair: Supervised) -> list[Answer]:
    return uvloop.run(run_streams(pair.port, LOAD))


@pytest.fixture
def up(pair: Supervised) -> Supervised:
    pair.wait_until(pair.restored, "an active and a standby")
    return pair


def standby(up: Supervised) -> EngineSeen:
    found = up.engine("standby")
    assert found is not None, "no engine stands by"
    return found


def asked(up: Supervised, engine: EngineSeen, path: str, method: str = "GET") -> tuple[int, dict[str, object]]:
    """What its own page answers."""
    return ask(int(up.records()[engine.name]["status"].rpartition(":")[2]), path, method)


def pids(up: Supervised) -> set[int]:
    return {engine.pid for engine in up.engines()}


def terms_of(up: Supervised, engine: EngineSeen) -> list[Term]:
    return [term for term in up.terms() if term.pid == engine.pid]


def log_of(up: Supervised, engine: EngineSeen) -> str:
    return (up.folder / "logs" / f"{engine.name}.log").read_text()


def broken(up: Supervised, unbroken: list[Answer], hit: Callable[[], None], resumed: bool = True) -> None:
    """Run the load and hit in the middle of it: every stream ends as if nothing had happened, and by the engines' own
    journals nobody led beside another. The active is slow until then, so that no stream is over before."""
    first = up.active()

    async def run() -> list[Answer]:
        await in_thread(partial(up.chaos, first.name, "slow", factor=3.0))
        before = await in_thread(up.tokens_total)
        running = asyncio.ensure_future(run_streams(up.port, LOAD))
        enough = LOAD.streams * LOAD.tokens // 8
        await in_thread(up.wait_until, lambda: up.tokens_total() - before > enough, "streams under way")
        await in_thread(hit)
        if first.pid in await in_thread(pids, up):
            await in_thread(up.chaos, first.name, "clear")
        return await running

    outcome = compare("hit", unbroken, uvloop.run(run()))
    assert outcome.survived, (outcome, up.logs())
    assert outcome.resumed == (LOAD.streams if resumed else 0), "not in the middle of every stream"
    assert two_leaders(up.terms()) == []


@pytest.mark.long
@pytest.mark.parametrize("fault", ["wrong_tokens", "memory_flip"])
def test_a_wrong_canary_after_waking_takes_the_engine_out_again(up: Supervised, fault: str) -> None:
    """A standby that went bad after its last check takes over and is found out by its first batch. Nobody else can take
    over by then, so it serves on, flagged; once another engine stands by that one does, and this one is gone."""
    active, bad = up.active(), standby(up)

    def hit() -> None:
        up.chaos(bad.name, fault)
        kill_group(active.pid)

    answers = uvloop.run(hit_in_the_middle(up, LOAD, hit))
    assert [answer.wrong for answer in answers] == [""] * LOAD.streams, up.logs()
    assert {answer.exact for answer in answers} == {False}
    up.wait_restored(bad.pid)
    up.wait_until(lambda: bad.pid not in pids(up), "it to leave")
    assert "the canary's answer was wrong after taking over, twice" in log_of(up, bad)
    assert two_leaders(up.terms()) == []


@pytest.mark.long
def test_a_hung_wake_is_replaced(up: Supervised, unbroken: list[Answer]) -> None:
    """The standby's wake hangs: past its deadline /live says no, the supervisor kills it, the engine that died first
    is back by then and takes over; the streams have waited for it."""
    active, hung = up.active(), standby(up)
    seen: list[tuple[float, int]] = []

    def look() -> bool:
        seen.append((time.monotonic(), asked(up, hung, "/live")[0]))
        return seen[-1][1] == 503

    def hit() -> None:
        up.chaos(hung.name, "wake_hangs")
        began_s = time.monotonic()
        kill_group(active.pid)
        up.wait_until(look, "/live to say no")
        assert seen[-1][0] - began_s - WAKE_S > -0.1, "before its deadline"
        assert {status for _, status in seen[:-1]} == {200}

    broken(up, unbroken, hit)
    up.wait_restored(hung.pid)
    assert hung.pid not in pids(up)
    assert terms_of(up, hung) == [], "it led"
    screen = up.log("up")
    why = f"says that it cannot live: waking: the takeover takes longer than its bound of {WAKE_S:g} s"
    assert f"{hung.name} {why} (" in screen
    assert f"; killing pid {hung.pid}" in screen
    (told,) = [incident for incident in read_incidents(up.folder) if incident.pid == hung.pid]
    assert told.why.startswith(f"killed: it {why}"), "the incident has the cause, not how it was found out"


@pytest.mark.long
def test_a_standby_without_its_vault_is_not_ready(up: Supervised, unbroken: list[Answer]) -> None:
    """The vault dies and its keeper is stopped, so that nobody starts it again until that is found out: the standby
    says so and is not ready, the active serves on; with the vault the standby's word for its memory comes back, and
    nobody was restarted."""
    active, waiting, (vault, keeper) = up.active(), standby(up), up.vault_pids()
    noticed: list[dict[str, object]] = []

    def not_ready() -> bool:
        status, facts = asked(up, waiting, "/health")
        if status == 503:
            noticed.append(facts)
        return status == 503

    def hit() -> None:
        os.kill(keeper, signal.SIGSTOP)
        os.kill(vault, signal.SIGKILL)
        up.wait_until(not_ready, "the standby to notice")

    broken(up, unbroken, hit, resumed=False)
    assert (noticed[0]["state"], noticed[0]["live"]) == ("standby", True)
    assert "cannot vouch for its memory: the vault is gone" in str(noticed[0]["reason"])
    assert asked(up, active, "/health")[0] == 200
    up.wait_until(lambda: asked(up, waiting, "/health")[0] == 200, "the standby to be ready again")
    assert {active.pid, waiting.pid} == pids(up)
    broken(up, unbroken, lambda: kill_group(active.pid))
    assert up.active().pid == waiting.pid


@pytest.mark.long
def test_an_operator_puts_the_active_to_sleep(up: Supervised, unbroken: list[Answer]) -> None:
    """/engine/sleep: the standby takes over, the sleeper lives on and stands by; whatever happens to the others, it
    takes no part until /engine/wake_up; then it does again."""
    sleeper, other = up.active(), standby(up)
    answers: list[tuple[int, dict[str, object]]] = []
    broken(up, unbroken, lambda: answers.append(asked(up, sleeper, "/engine/sleep", "POST")))
    [(status, answer)] = answers
    assert (status, answer["status"]) == (200, "ok")
    assert "takes no part in the election until it is woken" in str(answer["message"])
    assert up.active().pid == other.pid
    assert standby(up).pid == sleeper.pid
    assert standby(up).facts["asleep"] is True
    terms = len(terms_of(up, sleeper))

    broken(up, unbroken, lambda: kill_group(other.pid))
    third = up.active()
    assert third.name == other.name, "the one that was killed came back and leads"
    assert (standby(up).pid, len(terms_of(up, sleeper))) == (sleeper.pid, terms)

    assert asked(up, sleeper, "/engine/wake_up", "POST")[0] == 200
    up.wait_until(lambda: standby(up).facts["asleep"] is False, "it to take part")
    broken(up, unbroken, lambda: kill_group(third.pid))
    assert (up.active().pid, len(terms_of(up, sleeper))) == (sleeper.pid, terms + 1)


@pytest.mark.long
def test_a_leader_without_its_lock_says_nothing_more(up: Supervised, unbroken: list[Answer]) -> None:
    """The lock's file is removed under the active, which serves or is idle: it goes, having sent nothing since the
    next one began; the standby leads with the lock of the new file."""
    lock = up.folder / "run" / "worker-1.lock"
    for serves in (True, False):
        active, waiting = up.active(), standby(up)

        def hit(pid: int = active.pid) -> None:
            lock.unlink()
            up.wait_until(lambda: pid not in pids(up), "the leader to go")

        broken(up, unbroken, hit) if serves else hit()
        up.wait_restored(active.pid)
        assert up.active().pid == waiting.pid
        assert log_of(up, active).count("the election's lock is lost: sending nothing more")
        assert str(waiting.pid) in lock.read_text()
        assert active.pid not in children_of(up.supervisor_pid)
    assert two_leaders(up.terms()) == []


# -- weights in doubt


def load_of(up: Supervised, engine: EngineSeen) -> int:
    load = asked(up, engine, "/health")[1]["load"]
    assert isinstance(load, int)
    return load


def said(up: Supervised) -> str:
    """To the same question, always."""
    return up.stream("of doubt", 20, seed=5).answer().text


def test_weights_are_loaded_anew_in_place_and_streams_wait(up: Supervised, unbroken: list[Answer]) -> None:
    """The only pair loads its weights again under open streams: they are held, and every one ends as if nothing had
    happened; the same engine leads, with a larger load, and its standby has the same one."""
    active, other = up.active(), standby(up)
    load, terms = load_of(up, active), len(terms_of(up, active))
    answers: list[tuple[int, dict[str, object]]] = []
    broken(up, unbroken, lambda: answers.append(asked(up, active, "/engine/reload", "POST")))
    [(status, answer)] = answers
    assert (status, answer["status"]) == (200, "ok"), answer
    assert up.active().pid == active.pid
    assert load_of(up, active) > load
    up.wait_until(lambda: load_of(up, other) == load_of(up, active), "a standby with the same load")
    assert len(terms_of(up, active)) == terms + 1


def test_damaged_weights_are_found_and_loaded_anew(up: Supervised) -> None:
    """Flipped bits show when the weights are compared, and are gone after it; what is right is left alone, and that is
    said; a standby is not asked."""
    active, other = up.active(), standby(up)
    load, before = load_of(up, active), said(up)
    up.chaos(active.name, "memory_flip")
    assert said(up) != before
    status, answer = asked(up, active, "/engine/verify", "POST")
    assert status == 200, answer
    assert "the weights are damaged" in str(answer["message"])
    assert (newer := load_of(up, active)) > load
    assert said(up) == before
    status, answer = asked(up, active, "/engine/verify", "POST")
    assert (status, load_of(up, active)) == (200, newer)
    assert "as they were written" in str(answer["message"])
    status, answer = asked(up, other, "/engine/verify", "POST")
    assert (status, load_of(up, active)) == (409, newer)
    assert "the one of its group that serves" in str(answer["message"])
