"""Sends SIGKILL at random instants, under load: to writers, readers, owners, the vault, its keeper, and both together.

After each kill: the committed bytes are importable and intact, everyone else goes on, and what `vault_watch` promises
holds. Before and after all of them the vault's and the keeper's descriptors, their processes and the memory they keep
are counted, with no client connected. The seed decides victims and instants; the machine decides the rest.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from bench import ROOT
from bench.vault.census import Census, census
from bench.vault.watch import NOTICE_S, Watch
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.testing.processes import kill_together, vault_pair, vault_processes
from holdfast.testing.waiting import wait_until
from tests.rigs.children import Child, ChildFailed

CATEGORIES = ("writer", "reader", "owner", "vault", "keeper", "both")
ACTORS = ("writer-0", "reader-0", "reader-1", "owner-0", "owner-1")
CHECKER = "checker-9"  # asked after each kill, never killed
# Longer than the keeper's longest back-off and every wait in the load; one that has done nothing by then is stuck.
RECOVER_S = 40.0
# A round of any actor is shorter, so that the next kill falls anywhere in it.
INSTANT_S_MAX = 0.15
POLL_S = 0.01

Told = Callable[[str], None]


class Campaign:
    """Holds a vault, the load on it, the kills, and what was seen."""

    def __init__(self, seed: int, told: Told = lambda text: None) -> None:
        self.seed = seed
        self._rng = random.Random(seed)
        self._told = told
        self._folder = Path(tempfile.mkdtemp(prefix="hf-kills-", dir="/tmp"))
        self._path = str(self._folder / "gms_host-0.sock")
        self._vault = VaultProcesses(VaultSettings("host-0", self._path), self._folder / "vault.log")
        self._actors: dict[str, Child] = {}
        self._later: list[tuple[str, dict[str, Any]]] = []
        self._questions = itertools.count(1)
        self.watch = Watch()
        self.recover_ms: dict[str, list[float]] = {name: [] for name in CATEGORIES}
        self.before: Census | None = None
        self.after: Census | None = None
        self._left: dict[int, str] = {}  # processes that outlived the vault's clean end

    @property
    def leaked(self) -> list[str]:
        if self.before is None or self.after is None:
            return ["not counted"]
        outlived = [f"the {role} with pid {pid} outlived its end" for pid, role in self._left.items()]
        return self.after.more_than(self.before) + outlived

    def run(self, kills: int) -> Self:
        """`kills` in all, as many of each category as can be; the folder stays if something was wrong."""
        plan = [CATEGORIES[place % len(CATEGORIES)] for place in range(kills)]
        self._rng.shuffle(plan)
        try:
            self._vault.start()
            self._start_all()  # until there are weights and a pool
            self.before = self._rest()
            self._start_all()
            for place, category in enumerate(plan):
                took_ms = self._hit(category)
                self.recover_ms[category].append(took_ms)
                self._told(f"{place + 1}/{kills} {category}: all goes on after {took_ms:.0f} ms")
            self.after = self._rest()
        except (ChildFailed, TimeoutError) as stuck:
            self.watch.wrong.append(str(stuck))
        finally:
            self._stop_all()
            self._vault.stop()
            self._left = vault_processes(self._path)
            if self.watch.wrong:
                self._told(f"logs are kept in {self._folder}")
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
        return self

    # -- the load

    def _spawn(self, name: str) -> None:
        settings = {"name": name, "role": name.partition("-")[0], "path": self._path, "seed": self._rng.getrandbits(32)}
        log = self._folder / f"{name}.log"
        self._actors[name] = Child("-m", "bench.vault", json.dumps(settings), log=log, folder=ROOT)

    def _start_all(self) -> None:
        since_s = time.monotonic()
        for name in (*ACTORS, CHECKER):
            self._spawn(name)
        self._all_go_on(since_s, "the start")

    def _stop_all(self) -> None:
        for actor in self._actors.values():
            actor.reap()
        self._listen()
        for name in self._actors:
            self.watch.died(name)
        self._actors.clear()

    def _rest(self) -> Census:
        """End the load, and count what is left."""
        self._stop_all()
        return census(self._path, RECOVER_S)

    def _listen(self) -> None:
        """Read what every process said. What was said before `until_s` is complete: a line that follows
        from another process's line is never judged before it."""
        for name, actor in self._actors.items():
            self._later += [(name, said) for said in actor.drain()]
        until_s = time.monotonic()
        for name, actor in self._actors.items():
            self._later += [(name, said) for said in actor.drain()]
        self._later.sort(key=lambda one: float(one[1]["at_s"]))
        ripe = [one for one in self._later if one[1]["at_s"] <= until_s]
        self._later = self._later[len(ripe) :]
        with (self._folder / "said.jsonl").open("a") as story:  # kept if something was wrong
            for name, said in ripe:
                story.write(json.dumps({"actor": name, **said}) + "\n")
                self.watch.take(name, said)

    # -- kills

    def _hit(self, category: str) -> float:
        """Kill at a random instant; how long until all is well again, in milliseconds."""
        until_s = time.monotonic() + self._rng.uniform(0, INSTANT_S_MAX)
        while (left_s := until_s - time.monotonic()) > 0:
            self._listen()
            time.sleep(min(POLL_S, left_s))
        self._later.append(("campaign", {"at_s": time.monotonic(), "kills": category}))
        if category in ("vault", "keeper", "both"):
            self._kill_servers(category)
            killed_s = time.monotonic() + NOTICE_S
        else:
            name = self._victim(category)
            killed_s = time.monotonic()
            self._actors[name].reap()
            self._listen()
            self.watch.died(name)
            self._spawn(name)
        self._importable(category)
        self._all_go_on(killed_s, f"the kill of {category}")
        return (time.monotonic() - killed_s) * 1000

    def _victim(self, role: str) -> str:
        self._listen()
        if role == "owner" and self.watch.owner:
            return self.watch.owner
        return self._rng.choice([name for name in ACTORS if name.startswith(role)])

    def _kill_servers(self, category: str) -> None:
        vault, keeper = vault_pair(self._path, RECOVER_S)
        kill_together({"vault": [vault], "keeper": [keeper], "both": [vault, keeper]}[category])
        if category == "both":
            self._listen()
            self.watch.total_loss(time.monotonic())
            # Started again as a supervisor would: once both are over.
            wait_until(self._vault.ensure, "the end of a vault and keeper that were killed", RECOVER_S)

    def _importable(self, category: str) -> None:
        """A newcomer gets the committed weights, intact, and none older than those acknowledged before it asked."""
        self._listen()
        newest, asked = self.watch.newest(), str(next(self._questions))
        self._actors[CHECKER].tell(asked)
        self._wait(lambda: self.watch.imported[0] == asked, f"the kill of {category}", lambda: CHECKER)
        identity = self.watch.imported[1]
        if self.watch.place(identity) < newest:
            self.watch.wrong.append(f"{identity} was imported after the kill of {category}; newer is acknowledged")

    def _all_go_on(self, since_s: float, what: str) -> None:
        """Everyone has done something since that takes a vault; of the owners, one."""

        def silent() -> list[str]:
            return [name for name in ACTORS if self.watch.heard_s.get(name, 0.0) <= since_s]

        def well() -> bool:
            owners = [name for name in silent() if name.startswith("owner")]
            return len(owners) < 2 and self.watch.owner != "" and len(owners) == len(silent())

        self._wait(well, what, lambda: str(silent()))

    def _wait(self, well: Callable[[], bool], what: str, logs: Callable[[], str]) -> None:
        """Raise TimeoutError if a process is stuck."""

        def ended() -> str:
            over = [name for name, actor in self._actors.items() if actor.process.poll() is not None]
            return f"{over[0]} ended by itself: {self._actors[over[0]].last_words()}" if over else ""

        def heard() -> bool:
            self._listen()
            return well()

        wait_until(heard, f"{what} to be over", RECOVER_S, every_s=POLL_S, ended=ended, logs=logs)
