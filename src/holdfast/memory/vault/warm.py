"""The vault's service that moves the weights of one device to host memory and back: carries out `warm_machine`'s
effects.

Always true:
- The weights machine grants only weights that are complete on the device.
- The keeper has a record only of weights that are complete on the device.
- Weights in host memory are lost when this process ends; no client relies on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.memory import protocol
from holdfast.memory.devices import Device, DeviceError, open_device, seal_memfd
from holdfast.memory.devices.host_memory import HostMemory, open_host_memory
from holdfast.memory.fdsocket import close_all, copy_all
from holdfast.memory.vault import pool_machine, weights_machine
from holdfast.memory.vault import warm_machine as machine
from holdfast.memory.vault.pool import VaultPool
from holdfast.memory.vault.sessions import Session
from holdfast.memory.vault.settings import LIVE, WARM
from holdfast.memory.vault.tags import InOrder, Shared
from holdfast.memory.vault.weights import VaultWeights
from holdfast.spec.names import is_host

# A thread copies weights between device and host memory, while the vault continues to serve.
#
# Always true: the thread opens the device (on a GPU, a context) for the copy out, and closes it when it frees the host
# memory; a failed or stopped copy leaves nothing behind; slabs made by a copy are complete when they are returned, and
# sealed on a host device.
#
# The vault has no digest of the weights, so it compares each slab's size and both its ends.


# Bytes per copy call: large enough to hide the call's cost, small enough to stop soon when the vault ends.
_PIECE_BYTES = 64 * 1024 * 1024
# Bytes compared at each end of a slab: detects swapped and unwritten slabs.
_END_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """Size and duration of a move. Memory is allocated (for a GPU: pinned) before the copy."""

    size_bytes: int
    copy_s: float
    took_s: float


class Mover:
    """The host memory of one set of weights. One thread makes all calls except `stop`; any may read `host_bytes`."""

    def __init__(self, device: str, now_s: Callable[[], float]) -> None:
        self._name = device
        self._now_s = now_s
        self._device: Device | None = None
        self._host: HostMemory | None = None
        self._addresses: list[int] = []
        self._stopped = False
        self.host_bytes = 0  # allocated

    def stop(self) -> None:
        """Stop, because the vault ends: a running copy fails at its next piece."""
        self._stopped = True

    def copy_out(self, sizes: Sequence[int], fds: Sequence[int]) -> Figures:
        """Copy a device's slabs to new host memory. The caller keeps the descriptors. Raises DeviceError or OSError."""
        began_s = self._now_s()
        try:
            device = self._device = open_device(self._name)
            host = self._host = open_host_memory(device)
            self._go_on()
            self._addresses = host.allocate(sizes)
            self.host_bytes = sum(sizes)
            own = copy_all(list(fds))
            try:
                copy_s = self._copy(device, host, sizes, own, out=True)
            finally:
                close_all(own)
        except BaseException:
            self.forget()
            raise
        return Figures(sum(sizes), copy_s, self._now_s() - began_s)

    def copy_in(self, sizes: Sequence[int]) -> tuple[list[int], Figures]:
        """Copy host memory, which stays unchanged, to new slabs on the device. Raises DeviceError or OSError."""
        began_s = self._now_s()
        device, host = self._device, self._host
        assert device is not None, "nothing is in host memory"
        assert host is not None, "nothing is in host memory"
        fds: list[int] = []
        try:
            for size in sizes:
                self._go_on()
                fds.append(device.create(size))
            copy_s = self._copy(device, host, sizes, fds, out=False)
            for fd in fds if is_host(self._name) else ():
                seal_memfd(fd)
        except BaseException:
            close_all(fds)
            raise
        return fds, Figures(sum(sizes), copy_s, self._now_s() - began_s)

    def forget(self) -> None:
        """Free the host memory, and on a GPU the context."""
        host, device = self._host, self._device
        self._host = self._device = None
        self._addresses.clear()
        with contextlib.ExitStack() as stack:  # in this order; the second runs even if the first fails
            if device is not None:
                stack.callback(device.close)
            if host is not None:
                stack.callback(host.close)
        self.host_bytes = 0

    # -- inside

    def _go_on(self) -> None:
        if self._stopped:
            raise DeviceError("the vault ends")

    def _copy(self, device: Device, host: HostMemory, sizes: Sequence[int], fds: Sequence[int], *, out: bool) -> float:
        """Copy all slabs out or in and compare their ends; return the seconds that the copies took."""
        with _mapped(device, sizes, fds, writable=not out) as start:
            began_s = self._now_s()
            try:
                at = start
                for size, address in zip(sizes, self._addresses, strict=True):
                    for offset in range(0, size, _PIECE_BYTES):
                        self._go_on()
                        piece = min(_PIECE_BYTES, size - offset)
                        if out:
                            host.copy_out(address + offset, at + offset, piece)
                        else:
                            host.copy_in(at + offset, address + offset, piece)
                    at += size
            finally:
                host.wait()
            copy_s = self._now_s() - began_s
            self._compare(device, sizes, start)
        return copy_s

    def _compare(self, device: Device, sizes: Sequence[int], at: int) -> None:
        for number, (size, address) in enumerate(zip(sizes, self._addresses, strict=True)):
            end = min(size, _END_BYTES)
            for offset in (0, size - end):
                if device.read(at + offset, end) != ctypes.string_at(address + offset, end):
                    raise DeviceError(f"slab {number} is not what was copied")
            at += size


@contextlib.contextmanager
def _mapped(device: Device, sizes: Sequence[int], fds: Sequence[int], *, writable: bool) -> Iterator[int]:
    """Map the slabs one after the other at a new address, until the context exits."""
    total = sum(sizes)
    address = device.reserve(total)
    try:
        device.map_many(address, list(zip(sizes, fds, strict=True)), writable=writable)
        try:
            yield address
        finally:
            device.unmap(address, total)
    finally:
        device.release(address, total)


class VaultWarm:
    def __init__(self, shared: Shared, weights: VaultWeights, pool: VaultPool) -> None:
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._weights = weights
        self._pool = pool  # dropped when the weights leave the device
        self.state = machine.WarmState()
        self.perform = InOrder(self._carry_out)
        self._mover = Mover(shared.device, shared.now_s)
        self._thread = ThreadPoolExecutor(1, "moving")  # one thread, so that its tasks run in order
        if shared.budget.host_limit_bytes:
            self._thread.submit(int)  # starts the thread now: it might not be possible later, during a move
        self._askers = itertools.count(1)
        self._asked: dict[int, tuple[Session, int]] = {}  # asker -> session and call to answer
        self._slabs: list[int] = []  # made by a copy, not yet in the keeper
        self._figures = Figures(0, 0.0, 0.0)  # of the last move
        self.device_bytes = 0  # allocated or reserved for a promotion, or not yet dropped by the keeper

    def end(self) -> None:
        self._mover.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def facts(self) -> dict[str, Any]:
        """Return the status of the weights. While they are not on the device, their phase is their level."""
        level, limit_bytes = self.state.level, self._shared.budget.host_limit_bytes
        phase = {} if level is machine.WeightsLevel.HOT else {"weights": level}
        return phase | {"host_bytes": self._mover.host_bytes, "host_budget_bytes": limit_bytes}

    # -- calls

    def demote(self, session: Session, message: protocol.Demote) -> None:
        current = self._weights.state.current
        self.step(
            machine.DemoteWeights(
                self._asker(session, message.call),
                current.number if current is not None else None,
                sum(self._weights.layouts[current.number].slab_sizes) if current is not None else 0,
                self._users(),
                # The whole limit: the same thread frees the last set's host memory before it takes more.
                self._shared.budget.host_limit_bytes,
            )
        )

    def promote(self, session: Session, message: protocol.Promote) -> None:
        budget = self._shared.budget
        room = max(0, budget.limit_bytes - budget.used_bytes()) if budget.limit_bytes else None
        self.step(machine.PromoteWeights(self._asker(session, message.call), room))

    def _asker(self, session: Session, call: int) -> int:
        asker = next(self._askers)
        self._asked[asker] = (session, call)
        return asker

    def _users(self) -> tuple[str, ...]:
        weights = self._weights.state
        numbers = [weights.writer.session] if weights.writer is not None else []
        numbers += [reader.session for reader in weights.readers]
        numbers += [mapper.session for mapper in self._pool.state.in_use()]
        known = self._shared.sessions
        return tuple(
            repr(known[number]) if number in known else f"client {number}: its process has not ended"
            for number in dict.fromkeys(numbers)
        )

    # -- events and effects

    def step(self, event: machine.Event) -> None:
        self.state, effects = machine.step(self.state, event)
        self.perform(effects)

    def _carry_out(self, effect: machine.Effect) -> None:
        match effect:
            case machine.HideWeights():
                self._weights.step(weights_machine.WeightsMoved(away=True))
            case machine.CopyOut(generation):
                self._in_thread(partial(self._copy_out, generation))
            case machine.FreeDevice(generation):
                self._shared.mark(WARM)  # before the device's copy is freed: if this vault dies, the next one must know
                self._pool.step(pool_machine.Discard())
                self.device_bytes = self.state.size_bytes
                self._weights.drop_slabs(generation, self._on_keeper_updated)
            case machine.CopyIn(generation):
                self.device_bytes = self.state.size_bytes
                self._in_thread(partial(self._copy_in, generation))
            case machine.RecordSlabs(generation):
                self.device_bytes = 0  # they are in a record now
                slabs, self._slabs = self._slabs, []
                self._weights.record_slabs(generation, slabs, self._on_keeper_updated)
            case machine.FreeHost():
                self._loop.run_in_executor(self._thread, self._mover.forget).add_done_callback(self._forgotten)
            case machine.ShowWeights():
                self._shared.mark(LIVE)
                self._weights.step(weights_machine.WeightsMoved(away=False))
            case machine.MoveDone(asker):
                self._answer(asker)
            case machine.RefuseMove(asker, code, reason):
                session, call = self._asked.pop(asker)
                session.fail(call, code, reason)

    def _answer(self, asker: int) -> None:
        session, call = self._asked.pop(asker)
        figures = self._figures
        copy_ms, took_ms = figures.copy_s * 1000, figures.took_s * 1000
        session.reply(protocol.Moved(call, figures.size_bytes, copy_ms, took_ms))
        moved = f"{figures.size_bytes} bytes in {took_ms:.0f} ms"
        self._shared.note(f"{session!r} had the weights moved, {moved}: {self.state!r}")

    def _on_keeper_updated(self) -> None:
        self.device_bytes = 0
        self.step(machine.KeeperUpdated())

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
