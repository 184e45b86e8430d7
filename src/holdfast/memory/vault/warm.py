"""The weights of one device in host memory, as the vault serves that: the level machine's effects carried out.

Always true: the weights' machine grants nothing of what is not whole on the device; the keeper has a record of what is
whole on the device, and of nothing else; what is in host memory is gone with this process, and was never promised.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.memory import protocol
from holdfast.memory.vault import warm_machine as machine
from holdfast.memory.vault import weights_machine
from holdfast.memory.vault.kept import nothing
from holdfast.memory.vault.moving import Figures, Mover
from holdfast.memory.vault.pool import VaultPool
from holdfast.memory.vault.settings import LIVE, WARM
from holdfast.memory.vault.tags import InOrder, Shared
from holdfast.memory.vault.weights import VaultWeights

if TYPE_CHECKING:
    from holdfast.memory.vault.sessions import Session


class VaultWarm:
    """Which level the weights are at, and the moves between."""

    def __init__(self, shared: Shared, weights: VaultWeights, pool: VaultPool) -> None:
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._weights = weights
        self._pool = pool  # which goes with the weights that leave
        self.state = machine.Warm()
        self.perform = InOrder(self._carry_out)
        self._mover = Mover(shared.device, shared.now_s)
        self._thread = ThreadPoolExecutor(1, "moving")  # one: its work is done in order
        if shared.budget.host_limit_bytes:
            self._thread.submit(nothing)  # which starts it, where one could not be when a move has begun
        self._askers = itertools.count(1)
        self._asked: dict[int, tuple[Session, int]] = {}  # asker -> whom to answer, and which call
        self._slabs: list[int] = []  # made by a copy, on their way to the keeper
        self._figures = Figures(0, 0.0, 0.0)  # of the last move
        self.device_bytes = 0  # made or promised for a promotion, or not yet let go of by the keeper

    def end(self) -> None:
        """This vault ends."""
        self._mover.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def facts(self) -> dict[str, Any]:
        """Over those of the weights: their phase is their level, while they are not on the device."""
        level, limit_bytes = self.state.level, self._shared.budget.host_limit_bytes
        phase = {} if level is machine.Level.HOT else {"weights": level}
        return phase | {"host_bytes": self._mover.host_bytes, "host_budget_bytes": limit_bytes}

    # -- calls

    def demote(self, session: Session, call: int) -> None:
        current = self._weights.state.current
        self.step(
            machine.Demote(
                self._asker(session, call),
                current.number if current is not None else None,
                sum(self._weights.layouts[current.number].slab_sizes) if current is not None else 0,
                self._users(),
                # All of it: what the last set had is given back before more is taken, in the same thread.
                self._shared.budget.host_limit_bytes,
            )
        )

    def promote(self, session: Session, call: int) -> None:
        budget = self._shared.budget
        room = max(0, budget.limit_bytes - budget.used_bytes()) if budget.limit_bytes else None
        self.step(machine.Promote(self._asker(session, call), room))

    def _asker(self, session: Session, call: int) -> int:
        asker = next(self._askers)
        self._asked[asker] = (session, call)
        return asker

    def _users(self) -> tuple[str, ...]:
        weights = self._weights.state
        numbers = [weights.writer.session] if weights.writer is not None else []
        numbers += [reader.session for reader in weights.readers]
        numbers += [seat.session for seat in self._pool.state.in_use()]
        return tuple(self._name(number) for number in dict.fromkeys(numbers))

    def _name(self, number: int) -> str:
        session = self._shared.sessions.get(number)
        return repr(session) if session is not None else f"client {number}, whose process has not ended"

    # -- events and effects

    def step(self, event: machine.Event) -> None:
        self.state, effects = machine.step(self.state, event)
        self.perform(effects)

    def _carry_out(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Leave():
                self._weights.step(weights_machine.Move(away=True))
            case machine.CopyOut(generation):
                self._in_thread(partial(self._copy_out, generation))
            case machine.FreeDevice(generation):
                self._free_device(generation)
            case machine.CopyIn(generation):
                self.device_bytes = self.state.size_bytes
                self._in_thread(partial(self._copy_in, generation))
            case machine.Record(generation):
                self.device_bytes = 0  # they are in a record now
                slabs, self._slabs = self._slabs, []
                self._weights.keep(generation, slabs, self._settled)
            case machine.FreeHost():
                self._loop.run_in_executor(self._thread, self._mover.forget).add_done_callback(self._forgotten)
            case machine.Return():
                self._shared.mark(LIVE)
                self._weights.step(weights_machine.Move(away=False))
            case machine.Done(asker):
                self._answer(asker)
            case machine.Refuse(asker, code, reason):
                session, call = self._asked.pop(asker)
                session.fail(call, code, reason)

    def _answer(self, asker: int) -> None:
        session, call = self._asked.pop(asker)
        figures = self._figures
        copy_ms, took_ms = figures.copy_s * 1000, figures.took_s * 1000
        session.reply(protocol.Moved(call, figures.size_bytes, copy_ms, took_ms))
        moved = f"{figures.size_bytes} bytes in {took_ms:.0f} ms"
        self._shared.note(f"{session!r} had the weights moved, {moved}: {self.state!r}")

    def _free_device(self, generation: int) -> None:
        self._shared.mark(WARM)  # before the device's copy goes: whoever follows a vault that dies now must know
        self._pool.discard()
        self.device_bytes = self.state.size_bytes
        self._weights.lose(generation, self._settled)

    def _settled(self) -> None:
        self.device_bytes = 0
        self.step(machine.Settled())

    # -- the thread

    def _in_thread(self, work: Callable[[], Figures]) -> None:
        self._loop.run_in_executor(self._thread, work).add_done_callback(self._copied)

    def _copy_out(self, generation: int) -> Figures:
        return self._mover.copy_out(self._weights.layouts[generation].slab_sizes, self._weights.slabs(generation))

    def _copy_in(self, generation: int) -> Figures:
        self._slabs, figures = self._mover.copy_in(self._weights.layouts[generation].slab_sizes)
        return figures

    def _forgotten(self, work: asyncio.Future[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self._shared.note(f"host memory was not given back: {error!r}")

    def _copied(self, copy: asyncio.Future[Figures]) -> None:
        if copy.cancelled():
            return  # the vault ends
        error = copy.exception()
        if error is not None:
            self.device_bytes = 0
            self._shared.note(f"{self.state!r} failed: {error!r}")
            self.step(machine.CopyFailed(str(error) or repr(error)))
            return
        self._figures = copy.result()
        self.step(machine.Copied())
