"""An engine of a group that is to lead no more, for a while: it sleeps, with its memory mapped or let go of.

Always true: who sleeps holds no lock and takes no part in the election; who is woken with memory that was let go of has
mapped it again and answered the canary before it takes part, or stays asleep.
"""

from __future__ import annotations

from holdfast.core.errors import UserError
from holdfast.engines.contract import ShadowEngine
from holdfast.failover.lifecycle import State
from holdfast.worker.election import Election
from holdfast.worker.failures import FAILURES, in_words
from holdfast.worker.levers import Actions
from holdfast.worker.process import Worker


class Sleeping:
    """The levers for that; each is bounded by whoever asks."""

    def __init__(self, worker: Worker, engine: ShadowEngine, election: Election) -> None:
        self._worker = worker
        self._engine = engine
        self._election = election

    def actions(self) -> Actions:
        return {"sleep": self.sleep, "let_go": self.let_go, "wake_up": self.wake_up}

    async def sleep(self) -> str:
        """Step back and take no part in the election until `wake_up`."""
        if self._worker.life.state is State.INIT:
            raise UserError("it is still loading; it can sleep once it stands by")
        self._election.rest()
        await self._election.rested.wait()
        if self._election.asleep:
            self._worker.introduce(active=False)  # an engine that looks for a standby is told that this is none
        return "asleep: it takes no part in the election until it is woken"

    async def let_go(self) -> str:
        """Sleep with nothing of the vault's mapped, so that it can be moved to host memory."""
        await self.sleep()
        try:
            await self._engine.let_go()
        except FAILURES as error:
            raise UserError(f"it could not let go of its memory: {in_words(error)}") from error
        return "asleep, and nothing of the vault's is mapped until it is woken"

    async def wake_up(self) -> str:
        """Map again what was let go of, try it, and take part. Who leads is the election's to say."""
        if self._election.asleep:
            await self._stand_up()
        slept = self._election.asleep
        self._election.take_part(self._worker.clock.monotonic_s())
        if slept:
            self._worker.introduce(active=False)
        return "it takes part in the election again"

    async def _stand_up(self) -> None:
        try:
            wrong = await self._engine.stand_up()
        except FAILURES as error:
            raise UserError(f"it stays asleep: {in_words(error)}") from error
        if wrong:
            self._worker.sessions.fatal(f"the canary's answer was wrong after it was woken: {wrong}")
