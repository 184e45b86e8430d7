"""One worker as control reaches it: a canary connection, kept open and opened again, and its beats.

What it is asked and what it answers goes through one connection; who it is comes with its welcome, and every change of
that (it wakes, it loads afresh) in messages or beats. What follows from any of it is not decided here.

Always true: a worker is told of as found only once it has said who it is, and as lost only when its connection is down
and its key or its process is gone; waits are bounded, so a worker that hangs costs its own contact only.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace

import msgspec

from holdfast.control import words as w
from holdfast.control.asking import REASON_CHARS_MAX, Asker, Keeper
from holdfast.control.questions import known_of
from holdfast.control.ward import WorkerFacts, facts_of
from holdfast.core.address import parse_address
from holdfast.core.ports import Network
from holdfast.core.tasks import beside
from holdfast.discovery.registry import Instance
from holdfast.health.liveness import Judged, Verdict
from holdfast.health.watcher import CONNECT_TIMEOUT_S, BeatWatcher, Finding, is_local, probe
from holdfast.wire.framed import Framed
from holdfast.wire.frames import FrameError
from holdfast.wire.messages import (
    Active,
    Beat,
    Closed,
    Draining,
    Pong,
    Reload,
    Reloaded,
    Step,
    StepDown,
    Welcome,
    decode_to_frontend,
)

log = logging.getLogger("holdfast.control")

RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
ENDED = frozenset("ZXx")
# Another is heard if it was within this: an idle worker's beats come each second. Shorter than any silence that makes
# one be gone, so that of several that fall silent together none bears witness against the next.
WITNESS_S = 1.2


class CanaryConnection(Framed):
    """Questions out, answers in."""

    purpose = "canary"

    def __init__(self, contact: Contact, peer: str) -> None:
        super().__init__(peer)
        self._contact = contact

    def data_received(self, data: bytes) -> None:
        self._contact.heard()
        try:
            for payload in self._splitter.feed(data):
                message = decode_to_frontend(payload)
                if self.welcomed.done():
                    self._contact.take(message)
                else:
                    self._first(message)
        except FrameError as error:
            self._break(f"worker sent what is not our protocol: {error}")


class Contact:
    """One worker. `serving`: it may have traffic already; `token`: what its levers ask for from another machine."""

    def __init__(
        self,
        instance: Instance,
        network: Network,
        rng: random.Random,
        peer: str,
        keeper: Keeper,
        *,
        serving: bool,
        token: str = "",
    ) -> None:
        self.instance = instance
        self.path = instance.key.path
        self._network = network
        self._rng = rng
        self._peer = peer
        self._keeper = keeper
        self._tell = keeper.tell
        self._serving = serving
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._connection: CanaryConnection | None = None
        self._asker = Asker(self.path, keeper, self._send, self._occupancy)
        self._is_lost = False
        self._is_local = False
        self._is_over = False
        self._last_words = ""  # why it exits, by its own word
        self._withheld: Judged | None = None  # that it is gone, which nobody else's life bears out yet
        self.welcome: Welcome | None = None
        self.facts: WorkerFacts | None = None  # as last told
        self.withdrawn = False  # its key is gone from the store
        self.heard_s = 0.0  # when anything last came from it
        self.reason = "connecting"
        self.beats = BeatWatcher(
            name=instance.name,
            address=instance.record.beat_address,
            network=network,
            peer=peer,
            check=self._check,
            on_finding=self._found,
            on_failing=self._fails,
        )

    def __repr__(self) -> str:
        return f"<Contact {self.instance.name} {self.reason}, {self.beats!r}>"

    # -- the connection

    async def keep(self) -> None:
        """Connect, listen, reconnect, until the worker is withdrawn and its connection is down; the task's root."""
        async with beside(self.beats.keep(), "beats"):
            await self._keep_connected()

    async def _keep_connected(self) -> None:
        retry_s = RETRY_S_MIN
        while not (self.withdrawn and self._connection is None):
            began_s = self._loop.time()
            try:
                await self._session()
            except (OSError, ValueError) as error:
                self.reason = f"cannot connect: {error or type(error).__name__}"
            except Exception:
                log.exception("bug while in contact with %s", self.instance.name)  # costs a session
                self.reason = "internal error; the log has the details"
            self._look_whether_lost()
            if self._loop.time() - began_s > RETRY_S_MAX:
                retry_s = RETRY_S_MIN
            await asyncio.sleep(retry_s * self._rng.uniform(0.8, 1.2))
            retry_s = min(RETRY_S_MAX, retry_s * 2)

    async def _session(self) -> None:
        """One connection, from connect to loss."""
        connection = CanaryConnection(self, self._peer)
        try:
            address = parse_address(self.instance.record.address)
            await self._network.connect(address, lambda: connection, CONNECT_TIMEOUT_S)
            welcome = await connection.welcome(CONNECT_TIMEOUT_S)
            self._check(welcome)
            if self._is_over:
                return
            self._connection, self.welcome, self.reason = connection, welcome, "connected"
            self._is_lost, self._is_local = False, is_local(welcome.process)
            known = known_of(self.instance.card, welcome.checksum, welcome.vocabulary)
            facts = facts_of(self.instance.name, welcome)
            self._say(replace(facts, known=known, questions=self.instance.card.canaries_name()))
            self._hear_doubt(welcome.doubt)
            self.reason = await asyncio.shield(connection.lost)
        finally:
            self._connection = None
            connection.close()
            self._asker.lost(self.reason)

    def _check(self, welcome: Welcome) -> None:
        """The process behind an address must be the one the store spoke of."""
        key = self.instance.key
        expected = (key.instance, key.namespace, self.instance.record.checksum)
        if (welcome.instance, welcome.namespace, welcome.checksum) != expected:
            raise ConnectionError("another worker answers at its address")

    def end(self) -> None:
        """Another record stands at its key: this one's process is over, or somebody else's."""
        self.withdrawn = self._is_over = True
        if self._connection is not None:
            self._connection.close()

    def withdraw(self) -> None:
        """Its key is gone from the store, which means nothing while its connection stands."""
        self.withdrawn = True
        self._look_whether_lost()

    def _look_whether_lost(self) -> None:
        if self._connection is not None or self._is_lost:
            return
        ended = self._has_ended()
        if self.withdrawn or ended:
            self._is_lost = True
            how = "its process ended" if ended else "it left the store, and its connection is down"
            how = f"{how}; it said: {self._last_words}" if self._last_words else how
            self.facts = None
            self._tell(w.Lost(self.path, how))

    def _has_ended(self) -> bool:
        """By the kernel's word, where it can be asked: a key may outlive its process for as long as its lease."""
        if self.welcome is None or not self._is_local:
            return False
        seen = probe(self.welcome.process)
        return seen.gone or seen.state in ENDED

    # -- what it says

    def heard(self) -> None:
        self.heard_s = self._loop.time()

    def take(self, message: object) -> None:
        match message:
            case Step():
                for output in message.outputs:
                    self._asker.take(output)
            case Closed():
                for stream in message.streams:
                    self._asker.unanswered(stream, "the worker closed the stream without its end")
            case Pong():
                self._asker.take_pong(message)
            case Reloaded():
                log.warning("%s: asked to verify its weights: %s", self.instance.name, message.outcome)
                if message.right:
                    self._tell(w.Verified(self.path, message.load))
            case Active() if self.facts is not None:
                self._say(replace(self.facts, active=True))
                self._hear_doubt(message.doubt)
            case Draining() if self.facts is not None:
                self._say(replace(self.facts, active=False))
            case _:
                pass  # what is for frontends

    def _hear_doubt(self, doubt: str) -> None:
        """It serves on though it says that its answers may be wrong: a question of ours shows whether they are."""
        if doubt:
            log.warning("%s: %s", self.instance.name, doubt[:REASON_CHARS_MAX])
            self._tell(w.Doubted(self.path, doubt[:REASON_CHARS_MAX]))

    def _say(self, facts: WorkerFacts) -> None:
        if facts != self.facts:
            serving, self._serving = self._serving, False
            self.facts = facts
            self._tell(w.Found(self.path, facts, serving))

    def _fails(self, reason: str) -> None:
        self._last_words = reason
        self._tell(w.EngineFailed(self.path, reason))

    def _found(self, finding: Finding) -> None:
        if isinstance(finding, Judged):
            self._withheld = finding if finding.after is Verdict.GONE else None
            if self._withheld is None:
                self._tell(w.Judged(self.path, finding))

    def _look_for_a_witness(self, now_s: float) -> None:
        """Silence alone says that it is gone only to one who hears another: who hears nobody may be cut off himself,
        and those who have streams there judge for themselves."""
        if self._withheld is not None and self._keeper.hears(self.path, now_s - WITNESS_S):
            judged, self._withheld = self._withheld, None
            self._tell(w.Judged(self.path, judged))

    def tick(self, now_s: float) -> None:
        """Ten times a second."""
        before = self.beats.last
        streams_open = before is not None and before.running > 0
        self.beats.tick(now_s, streams_open=streams_open)
        self._look_for_a_witness(now_s)
        beat = self.beats.last
        if beat is not None and beat is not before:
            self.heard_s = now_s
            self._take_beat(beat)
        if self.facts is not None and self.facts.active:
            self._asker.tick(now_s)

    def _take_beat(self, beat: Beat) -> None:
        facts = self.facts
        if facts is not None and beat.load and beat.load != facts.load:
            self._say(replace(facts, load=beat.load))

    # -- what it is asked

    def ask(self, question: w.Ask) -> None:
        self._asker.ask(question)

    def reload(self, wish: w.Reload) -> None:
        self._send(Reload(wish.load, wish.in_place, wish.reason, self._token))

    def step_down(self, wish: w.Relieve) -> None:
        self._send(StepDown(wish.believed, wish.reason, self._token))

    def _send(self, message: msgspec.Struct) -> bool:
        if self._connection is None:
            return False
        self._connection.send(message)
        return True

    def _occupancy(self, own: int) -> float:
        """Running and waiting streams over places, without so many of ours."""
        beat, welcome = self.beats.last, self.welcome
        if beat is None or welcome is None:
            return 0.0
        return max(0, beat.running + beat.waiting - own) / max(1, welcome.concurrency)
