"""Pairs of real engines elected by a lock server (`holdfast run lock`) and by etcd, with a stream open all the time.

The answer is known beforehand. Who led when is read from the engines' own journals.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from holdfast.failover.journal import Term, read_terms, two_leaders
from holdfast.testing.answers import Answer
from holdfast.testing.clients import Received, read_answer
from holdfast.testing.deployment import Deployment, etcd_command
from holdfast.testing.rig import free_port
from holdfast.testing.waiting import in_thread
from tests.rigs.failover.known_answers import answer_to, ask_number

pytestmark = [pytest.mark.long, pytest.mark.processes]

GROUP = "pair"
ENGINES = ("engine-a", "engine-b")
LEASE_S = 6
# Loading, or a lease that must run out first; a shared machine may take many times what that needs.
BOUND_S = 60.0
TPOT_MS = 10.0
TOKENS = 1000  # ten seconds and more: enough for a kill in the middle of them
# `holdfast run lock`, with all it needs loaded, once somebody has opened a FIFO and closed it again.
AT_HAND = """
import sys
import holdfast.cli.app, holdfast.cli.start, holdfast.failover.lock_server.server, holdfast.wire.net
from holdfast.cli.main import main
print("at hand", flush=True)
open(sys.argv.pop(1)).read()
main()
"""


class Pair(Deployment):
    """A vault, and two engines that share it, elected by whatever `lock` names; no supervisor."""

    def __init__(self) -> None:
        super().__init__(workers=0, sim={"tpot_ms": TPOT_MS, "vault_gib": 0.1})
        self.lock = f"lock+unix://{self.folder}/run/lock.sock"
        self._etcd_ports = (free_port(), free_port())

    def use_etcd(self) -> None:
        self.lock = f"etcd://127.0.0.1:{self._etcd_ports[0]}/{GROUP}?lease_s={LEASE_S}"

    @property
    def vault_socket(self) -> str:
        return f"{self.folder}/run/gms_host-0.sock"

    def start_vault(self) -> None:
        self.start_role("vault", "vault", {"device": "host-0", "socket_path": self.vault_socket})

    def start_engine(self, name: str) -> None:
        self.start_worker(
            name,
            place={"vault_socket": self.vault_socket, "engine_id": ENGINES.index(name)},
            lock=self.lock,
            group=GROUP,
        )

    def start_engines(self) -> None:
        self.start_vault()
        for name in ENGINES:
            self.start_engine(name)
        self.wait_until(lambda: set(self.states().values()) == {"active", "standby"}, "a pair", BOUND_S)
        self.wait_until(lambda: len(self.alive_workers()) == 1, "the frontend to find the active one", BOUND_S)

    def holdfast(self, name: str, *words: str, **more: str) -> None:
        """The command itself, in the background."""
        self.start(name, self.command(*words), more)

    def start_lock_server(self, *more: str) -> None:
        self.holdfast("lock", "lock", "serve", "--address", self.lock.removeprefix("lock+"), *more)

    def next_lock_server(self, name: str) -> Path:
        """One that starts at once when this FIFO is opened: a leader waits two seconds for it, an import on a busy
        machine may take longer."""
        go = self.folder / "go"
        os.mkfifo(go)
        words = ("lock", "serve", "--address", self.lock.removeprefix("lock+"))
        self.start(name, [sys.executable, "-c", AT_HAND, str(go), *words])
        self.wait_until(lambda: "at hand" in self.log(name), "the next lock server", BOUND_S)
        return go

    def worker_by_hand(self, name: str, *more: str, **environ: str) -> None:
        words = ("--name", name, "--store", self.store, "--deployment", "bench", "--group", GROUP, "--lock", self.lock)
        memory = ("--vault-socket", self.vault_socket, "--vault-gib", "0.1", "--sim-tpot-ms", str(TPOT_MS))
        self.holdfast(name, "worker", *words, *memory, *more, **environ)

    def start_etcd(self) -> None:
        """Another one than the store: an outage is the election's alone."""
        self.start("etcd", etcd_command(self.folder, *self._etcd_ports))

    # -- looking

    def state_of(self, name: str) -> str:
        try:
            return str(self.worker_facts(name)["state"])
        except OSError:  # gone, or not there yet
            return ""

    def states(self) -> dict[str, str]:
        return {name: self.state_of(name) for name in ENGINES}

    def engine(self, state: str) -> str:
        return next(name for name, its in self.states().items() if its == state)

    def tokens_made(self) -> int:
        return int(self.worker_facts(self.engine("active"))["tokens_total"])

    def terms(self) -> list[Term]:
        return read_terms(self.folder / "run" / "journals" / GROUP)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as started:
        yield started


async def under_way(pair: Pair, tokens: int) -> asyncio.Task[Received]:
    """A stream that has tokens."""
    asking = asyncio.create_task(ask_number(pair.port, 1, tokens))
    await in_thread(pair.wait_until, lambda: pair.tokens_made() > 30, "tokens", BOUND_S)
    return asking


async def is_exact(asking: asyncio.Task[Received], tokens: int, resumed: int) -> Answer:
    """It ended as an unbroken one ends."""
    answer = read_answer(await asking)
    assert (answer.error, answer.done, answer.exact, answer.resumed) == (None, True, True, resumed)
    assert answer.tokens == answer_to(1, tokens)
    return answer


def switched(pair: Pair, leader: str) -> None:
    """The other engine leads, and the journals show one leader at a time."""
    assert pair.state_of(other(leader)) == "active"
    assert [term.engine for term in pair.terms()] == [leader, other(leader)]
    assert two_leaders(pair.terms()) == []


def other(name: str) -> str:
    return ENGINES[1 - ENGINES.index(name)]


@pytest.mark.timeout(300)
def test_a_pair_by_the_lock_server(pair: Pair) -> None:
    """The server killed and started again under a healthy active: no failover, tokens without a server, the standby
    waits on. Then the active killed: the standby goes on with the stream at once, exactly, and there was never more
    than one leader."""
    pair.start_lock_server()
    pair.start_engines()
    leader = pair.engine("active")
    go = pair.next_lock_server("lock-2")

    async def run() -> Answer:
        asking = await under_way(pair, TOKENS)
        await in_thread(pair.kill, "lock")
        before = await in_thread(pair.tokens_made)
        await in_thread(pair.wait_until, lambda: pair.tokens_made() > before, "tokens without a server", BOUND_S)
        await in_thread(go.write_bytes, b"")
        back = f"{leader} is back with the lock, grant 1"
        await in_thread(pair.wait_until, lambda: back in pair.log("lock-2"), back, BOUND_S)
        assert len(pair.terms()) == 1
        await in_thread(pair.kill, leader)
        return await is_exact(asking, TOKENS, resumed=1)

    answer = uvloop.run(run())
    print(f"worst gap {max(answer.gaps_s):.2f} s")
    switched(pair, leader)


@pytest.mark.timeout(300)
def test_a_pair_by_etcd(pair: Pair) -> None:
    """The active killed: once its lease has passed the standby goes on with the stream, exactly."""
    pair.use_etcd()
    pair.start_etcd()
    pair.start_engines()
    leader = pair.engine("active")

    async def run() -> Answer:
        asking = await under_way(pair, TOKENS)
        await in_thread(pair.kill, leader)
        return await is_exact(asking, TOKENS, resumed=1)

    answer = uvloop.run(run())
    print(f"worst gap {max(answer.gaps_s):.2f} s")
    switched(pair, leader)


@pytest.mark.timeout(300)
def test_an_etcd_outage_longer_than_the_lease(pair: Pair) -> None:
    """The active sends nothing after its lease may have passed, and exits with 1; nobody leads meanwhile; with etcd
    back the standby is elected and the stream ends exactly."""
    pair.use_etcd()
    pair.start_etcd()
    pair.start_engines()
    leader = pair.engine("active")

    async def run() -> tuple[float, int, Answer]:
        asking = await under_way(pair, TOKENS)
        await in_thread(pair.kill, "etcd")
        killed_s = time.monotonic()
        status = await in_thread(pair.processes[leader].wait, BOUND_S)
        assert pair.state_of(other(leader)) == "standby"
        pair.start_etcd()
        return killed_s, status, await is_exact(asking, TOKENS, resumed=1)

    killed_s, status, answer = uvloop.run(run())
    assert status == 1
    assert "the election's lock is lost" in pair.log(leader)
    served_s = pair.terms()[0].last_sent_ns / 1e9 - killed_s
    # It went on for as long as it could be sure of, and not a moment longer than the lease.
    assert LEASE_S / 4 < served_s < LEASE_S
    print(f"sent for {served_s:.2f} s after etcd's end; worst gap {max(answer.gaps_s):.2f} s")
    switched(pair, leader)


@pytest.mark.timeout(300)
def test_workers_by_hand_with_a_token(pair: Pair) -> None:
    """`holdfast run worker` joins an election over TCP with the token from a file or the environment, which no command
    line shows; with another token it is refused in words and exits with 1."""
    token, wrong = pair.folder / "token", pair.folder / "wrong"
    token.write_text("open sesame\n")
    wrong.write_text("open barley\n")
    pair.lock = f"lock+tcp://127.0.0.1:{free_port()}"
    pair.start_lock_server("--token-file", str(token))
    pair.start_vault()
    pair.worker_by_hand("engine-a", "--lock-token-file", str(token))
    pair.wait_until(lambda: pair.state_of("engine-a") == "active", "a leader", BOUND_S)
    pair.worker_by_hand("engine-b", HOLDFAST_LOCK_TOKEN="open sesame")
    pair.wait_until(lambda: pair.state_of("engine-b") == "standby", "a standby", BOUND_S)
    pair.worker_by_hand("engine-c", "--lock-token-file", str(wrong))
    assert pair.processes["engine-c"].wait(BOUND_S) == 1
    assert "refused engine-c: WrongToken" in pair.log("engine-c").splitlines()[-1]
    for name in ("lock", *ENGINES):
        assert b"sesame" not in Path(f"/proc/{pair.pid(name)}/cmdline").read_bytes()
    pair.signal("lock", signal.SIGINT)
    assert pair.processes["lock"].wait(BOUND_S) == 0
    assert "Traceback" not in pair.log("lock")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--address", "here"), "must start with tcp:// or unix://"),
        (("--address", "tcp://127.0.0.1:0"), "--token-file or $HOLDFAST_LOCK_TOKEN"),
        (("--address", "unix:///tmp/none/none/lock.sock"), "cannot serve unix:///tmp/none/none/lock.sock"),
        (("--window-s", "0.01"), "window must be 0.2 s or more"),
        (("--token-file", "/tmp/none/none"), "token file /tmp/none/none cannot be read"),
        (("--token-file", "/dev/null"), "token file /dev/null is empty"),
    ],
)
def test_a_lock_server_that_cannot_be(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """One line says what is wrong, and the status is 1."""
    command = [sys.executable, "-m", "holdfast", "lock", "serve", *words]
    env = os.environ | {"HOLDFAST_STATE_DIR": str(tmp_path), "HOLDFAST_LOCK_TOKEN": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
