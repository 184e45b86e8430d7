"""What the load said, judged: the promises of a vault as a pure function of the processes' own words.

Always true of a vault that keeps its promises: no reader sees weights that were not offered for commit; none that
asks after a commit was acknowledged sees older ones; an owner that takes a pool over finds every page that was
published and not withdrawn. After a loss of vault and keeper together, engines give back what they have mapped: weights
stay importable, though perhaps not the newest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

WRONG_MAX = 50  # enough to see what is wrong
# A role holds a few sockets and pipes; between its rounds it has let go of everything else.
OPEN_FDS_SLACK = 2
# What is done this soon after a kill may have been done before anyone noticed.
NOTICE_S = 0.05


@dataclass(slots=True)
class Watch:
    """Fed with every line of every process, in the order they were said."""

    wrong: list[str] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)
    heard_s: dict[str, float] = field(default_factory=dict)  # actor -> its last act that needs a vault and went well
    imported: tuple[str, str] = ("", "")  # the checker's last answer: what it was asked, which weights it got
    owner: str = ""  # the actor that owns the pool now
    _pool_may_be_fresh: bool = True  # none was made, or vault and keeper were killed and none owned it
    _leaving: bool = False  # the owner steps back: it may or may not give the pool back
    _given_back: bool = True  # after such a loss: the owner has gone on, so the vault has its pool again
    _lost_s: float = 0.0  # when they were; one that asked before may have been granted before
    _first_commit_s: float = float("inf")
    _offered: dict[str, tuple[int, float]] = field(default_factory=dict)  # identity -> place in the order, when
    _acknowledged: int = -1  # the newest one's place
    _published: set[str] = field(default_factory=set)
    _open_fds: dict[str, int] = field(default_factory=dict)

    def total_loss(self, at_s: float) -> None:
        """Vault and keeper are killed together: what follows begins with what engines still have mapped."""
        self._acknowledged = -1
        self._pool_may_be_fresh = not self.owner or self._leaving
        self._given_back = False
        self._lost_s = at_s

    def newest(self) -> int:
        """Return the place of the newest acknowledged commit: readers that ask from now on may see no older one."""
        return self._acknowledged

    def place(self, identity: str) -> int:
        return self._offered.get(identity, (-1, 0.0))[0]

    def died(self, actor: str) -> None:
        """Its successor counts its descriptors again."""
        self._open_fds.pop(actor, None)
        if self.owner == actor:
            self._leaves()
            self.owner = ""

    def take(self, actor: str, said: dict[str, Any]) -> None:
        at_s: float = said["at_s"]
        if "wrong" in said:
            self._add(actor, said["wrong"])
        elif "saw" in said:
            self._saw(actor, said, at_s)
        elif "imported" in said:
            self.imported = (said["asked"], said["imported"])
        elif "committing" in said:
            self._offered[said["committing"]] = (len(self._offered), at_s)
        elif "committed" in said:
            self._first_commit_s = min(self._first_commit_s, at_s)
            place, offered_s = self._offered[said["committed"]]
            if offered_s > self._lost_s:  # else it was acknowledged before the loss
                self._acknowledged = max(self._acknowledged, place)
            self._did(actor, "commit", at_s)
        elif "owns" in said:
            self._owns(actor, said)
        elif "withdrawing" in said or "published" in said:
            self._changed(actor, said, at_s)
        elif "handing_over" in said:
            self._leaving = True
            self._leaves()
        elif "handed_over" in said or "pool_lost" in said:
            # Its successor may have spoken first; one that lost its pool had one until another got a fresh one.
            self.owner = "" if self.owner == actor else self.owner
            self._did(actor, "handed over" if "handed_over" in said else "pool lost", at_s)
        elif "open_fds" in said:
            self._count_fds(actor, said["open_fds"])
        elif "empty" in said:
            self.did["empty"] += 1
            if said["asked_s"] > self._first_commit_s:
                self._add(actor, "was told that there are no weights")
        elif "kills" not in said:
            if "waits" in said and actor == self.owner:
                self.owner = ""  # it asks for a pool again: the one it had was lost before it could use it
            self.did["gave up" if "gave_up" in said else "waits" if "waits" in said else "retry"] += 1

    def _saw(self, actor: str, said: dict[str, Any], at_s: float) -> None:
        if said["saw"] not in self._offered:
            self._add(actor, f"sees {said['saw']}, which none has offered for commit")
        self._did(actor, "verify", at_s if said["connected"] else 0.0)

    def _owns(self, actor: str, said: dict[str, Any]) -> None:
        if said["fresh"]:
            if not self._pool_may_be_fresh:
                self._add(actor, "got a fresh pool though the old one should have survived")
            self._published.clear()
        else:
            missing = self._published - set(said["keys"])
            if missing and not said["reason"]:
                self._add(actor, f"adopted the pool without {len(missing)} of {len(self._published)} published pages")
            self._published = set(said["keys"])
        if said["asked_s"] > self._lost_s:
            self._pool_may_be_fresh = False
        self.owner, self._leaving, self._given_back = actor, False, True
        self.did["fresh pool" if said["fresh"] else "adopt"] += 1

    def _leaves(self) -> None:
        """The owner ends before it could give back what vault and keeper had lost: then none has it."""
        self._pool_may_be_fresh = self._pool_may_be_fresh or not self._given_back

    def _changed(self, actor: str, said: dict[str, Any], at_s: float) -> None:
        """Only the owner's pages count; one that lost its pool writes on until it notices."""
        if actor == self.owner:
            self._published -= set(said.get("withdrawing", ()))
            self._published |= set(said.get("published", ()))
        if "published" in said:
            self._given_back = self._given_back or at_s > self._lost_s + NOTICE_S
            self._did(actor, "publish", at_s if said["connected"] else 0.0)

    def _count_fds(self, actor: str, count: int) -> None:
        first = self._open_fds.setdefault(actor, count)
        if count > first + OPEN_FDS_SLACK:
            self._add(actor, f"has {count} open descriptors between two rounds, {first} at first")

    def _did(self, actor: str, what: str, at_s: float) -> None:
        self.did[what] += 1
        self.heard_s[actor] = max(at_s, self.heard_s.get(actor, 0.0))

    def _add(self, actor: str, text: str) -> None:
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append(f"{actor}: {text}")
