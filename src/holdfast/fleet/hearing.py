"""Of which nodes a controller hears: who is lost, who is waited for, and who is forgotten. Pure.

Theory. A node tells of itself by a leased record. Without one for `GRACE_S` it is lost; so it is when its record stands
unchanged for longer than its agent would leave it: a process that is stopped keeps its lease where its machine answers
for it. Not before, for leased records vanish with the store that had them and come again. For the same reason nothing
is decided, after a beginning or an outage, until each node that was asked for anything was heard, or that time is over.
A record that cannot be read is a node that is there, as it was; where nobody knows how that is, since a controller
begins, it is waited for longer.

A node without a record for `FORGET_S` is forgotten, with what was asked of it: nobody waits for it again. If it comes
back all the same, it is a new one that has replicas: names are used once, and an agent without orders keeps all it has.

Always true: nobody is forgotten whose record stands, whether that can be read or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

# A store that restarts is back in a second or two, and its clients' leased keys within another.
GRACE_S = 5.0
# A node whose record cannot be read as a controller begins: its agent tells anew every 5 s, so that whatever was torn
# is whole long before; what still cannot be read then is of another version, and decisions do not wait for it for ever.
UNREAD_S = 60.0
SILENT = 3  # times that a node did not tell of itself, and is lost: its agent is stopped, or its machine thrashes
FORGET_S = 600.0  # a machine that starts again is back sooner


class Hearing:
    def __init__(self) -> None:
        self._gone: dict[str, float] = {}  # nodes without a record that are not lost yet, and since when
        self._absent: dict[str, float] = {}  # all without one
        self._silent_s: dict[str, tuple[float, float]] = {}  # of those with one: how long it may stand, and until when
        self._unheard: dict[str, float] = {}  # nodes that are waited for, each until then

    def begin(self, asked: Collection[str], told: Collection[str], unread: Collection[str], now_s: float) -> None:
        """Nodes that were ever asked for anything, that have a record, and whose record cannot be read."""
        missing = [name for name in asked if name not in told and name not in unread]
        self._unheard = dict.fromkeys(missing, now_s + GRACE_S) | dict.fromkeys(unread, now_s + UNREAD_S)
        self._absent = dict.fromkeys(missing, now_s)

    @property
    def is_any_gone(self) -> bool:
        return bool(self._gone)

    def hear(self, name: str, again_s: float, now_s: float) -> None:
        """A node tells of itself, and does so again within that time; 0: nobody knows."""
        self._silent_s[name] = SILENT * again_s, now_s + SILENT * again_s
        for kept in (self._gone, self._absent, self._unheard):
            kept.pop(name, None)

    def hear_unread(self, name: str, now_s: float) -> None:
        """It told of itself, and what it told cannot be read."""
        self._gone.pop(name, None)
        self._absent.pop(name, None)
        if name in self._silent_s:
            for_s, _ = self._silent_s[name]
            self._silent_s[name] = for_s, now_s + for_s
            self._unheard.pop(name, None)

    def miss(self, name: str, now_s: float) -> None:
        """Its record is not there any more."""
        self._silent_s.pop(name, None)
        self._gone.setdefault(name, now_s)
        self._absent.setdefault(name, now_s)
        if name in self._unheard:
            self._unheard[name] = min(self._unheard[name], now_s + GRACE_S)

    def listen_anew(self, now_s: float) -> None:
        """Nobody was listened to for a while."""
        self._silent_s = {name: (for_s, now_s + for_s) for name, (for_s, _) in self._silent_s.items()}

    def away(self, alive: Iterable[str], now_s: float) -> None:
        """The store was lost, and is back: whoever is missing has its time again, and all are to be heard anew."""
        self._gone, self._absent = dict.fromkeys(self._gone, now_s), dict.fromkeys(self._absent, now_s)
        self._unheard |= dict.fromkeys(alive, now_s + GRACE_S)
        self.listen_anew(now_s)

    # -- what follows

    def lost(self, now_s: float) -> Iterator[tuple[str, str]]:
        """Who is, and why."""
        for name in [name for name, since_s in self._gone.items() if now_s >= since_s + GRACE_S]:
            del self._gone[name]
            yield name, f"it was not heard of for {GRACE_S:g} s"
        for name, (for_s, until_s) in self._silent_s.items():
            if for_s and now_s >= until_s:
                yield name, f"its agent told nothing for {for_s:g} s; is it stopped?"

    def given_up(self, now_s: float) -> list[str]:
        """Nodes that were waited for and are not any more."""
        due = [name for name, until_s in self._unheard.items() if now_s >= until_s]
        for name in due:
            del self._unheard[name]
        return due

    @property
    def waits(self) -> bool:
        return bool(self._unheard)

    def forgotten(self, now_s: float) -> list[str]:
        """Nodes that are not counted with any more, each once."""
        due = [name for name, since_s in self._absent.items() if now_s >= since_s + FORGET_S]
        for name in due:
            del self._absent[name]
        return due

    def deadlines_s(self) -> Iterator[float]:
        yield from (since_s + GRACE_S for since_s in self._gone.values())
        yield from (since_s + FORGET_S for since_s in self._absent.values())
        yield from (until_s for for_s, until_s in self._silent_s.values() if for_s)
        yield from self._unheard.values()
