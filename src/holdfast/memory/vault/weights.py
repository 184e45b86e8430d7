"""The vault's service for the weights of one device: carries out the effects of `weights_machine`.

Always true:
- A reader gets only a committed generation.
- A commit is acknowledged after the keeper has the record; before that, the vault itself seals host slabs.
- Slabs of a writer that has not committed are in no record.
"""

from __future__ import annotations

from typing import cast

import msgspec

from holdfast.memory import protocol
from holdfast.memory.fdsocket import close_all
from holdfast.memory.layout import Layout
from holdfast.memory.vault import weights_machine as machine
from holdfast.memory.vault.records import Then
from holdfast.memory.vault.sessions import Session, Upload
from holdfast.memory.vault.tags import (
    InOrder,
    Shared,
    Why,
    cannot_commit,
    wrong_count,
    wrong_donation,
    wrong_slab,
)

PREFIX = "weights/"
GONE = "no-weights"  # record of a number: no generation up to it is current, though readers may still map it
# Upper bound on a wait: a large model loads for minutes.
TIMEOUT_MS_MAX = 24 * 3600 * 1000

_decode_layout = msgspec.msgpack.Decoder(Layout).decode
_encode = msgspec.msgpack.Encoder().encode


class VaultWeights:
    """Carries out what the weights' machine decides, for tag `weights`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.state = machine.WeightsState()
        self.perform = InOrder(self._carry_out)
        self.layouts: dict[int, Layout] = {}  # by generation
        self._uploads: dict[int, Upload] = {}  # by session
        # True after a total loss until weights are written: an engine that still maps the weights may donate them.
        self._lost = False

    # -- the vault's life

    def adopt(self, readers: list[machine.GenerationHolder], refill_from_s: float | None) -> None:
        """Restore the weights from the keeper's records. `refill_from_s` is set if records were lost: until then,
        clients that map the weights may donate them. NEVER_S: the weights were lost in host memory and are not
        reloaded."""
        generations = []
        for key, record in self._shared.records.by_key.items():
            if key.startswith(PREFIX):
                number = int(key.removeprefix(PREFIX))
                self.layouts[number] = _decode_layout(record.blob)
                generations.append(machine.Generation(number, self.layouts[number].hash()))
        self._lost = refill_from_s is not None and not generations
        known = {generation.number for generation in generations}
        kept = [reader for reader in readers if reader.generation in known]
        gone = self._shared.records.by_key.get(GONE)
        self.state, effects = machine.restore(
            generations,
            kept,
            refill_from_s=None if generations and refill_from_s != machine.NEVER_S else refill_from_s,
            gone=int(gone.blob) if gone is not None else 0,
        )
        self.perform(effects)

    def used_bytes(self) -> int:
        """Return the bytes kept on the device. Weights in host memory have a layout here, but no record."""
        records = self._shared.records.by_key
        layouts = [layout for number, layout in self.layouts.items() if f"{PREFIX}{number}" in records]
        uploads = sum(sum(upload.sizes) for upload in self._uploads.values())
        return sum(sum(layout.slab_sizes) for layout in layouts) + uploads

    def facts(self) -> dict[str, object]:
        current = self.state.current
        layout = self.layouts.get(current.number) if current is not None else None
        return {
            "weights": self.state.phase,
            "layout_hash": current.layout_hash if current is not None else None,
            "identity": layout.identity if layout is not None else None,
            "tensors": len(layout.tensors) if layout is not None else 0,
            "readers": len(self.state.readers),
            "weights_bytes": self.used_bytes(),
        }

    # -- calls

    def ask(self, session: Session, message: protocol.AskWeights) -> None:
        if message.mode not in ("rw", "ro", "rw_or_ro", "drop"):
            session.fail(message.call, "bad_request", f"mode {message.mode!r}; use rw, ro, rw_or_ro or drop")
            return
        if session.weights_call:
            session.fail(message.call, "busy", "this session waits for the weights already")
            return
        timeout_ms = min(max(0, message.timeout_ms), TIMEOUT_MS_MAX)
        session.weights_call = message.call
        deadline_s = self._shared.now_s() + timeout_ms / 1000
        mode = cast("machine.Mode", message.mode)  # checked above
        self.step(machine.RequestLock(session.number, mode, deadline_s, message.wait_for_writer, message.replace))

    def add_slabs(self, session: Session, message: protocol.AddSlabs, fds: list[int]) -> None:
        """Take a writer's slabs. Refused slabs are closed and change nothing."""
        why = self._cannot_add(session, message.sizes, fds)
        if why is not None:
            close_all(fds)
            session.fail(message.call, *why)
            return
        self._uploads[session.number].add(message.sizes, fds)
        session.reply(protocol.Done(message.call))

    def _cannot_add(self, session: Session, sizes: list[int], fds: list[int]) -> Why | None:
        upload = self._uploads.get(session.number)
        if upload is None:
            return "not_writer", "only the session that holds rw hands over slabs"
        return (
            wrong_count(upload, sizes, fds)
            or self._shared.budget.exceeded(sizes)
            or wrong_slab(self._shared.device, sizes, fds, sealed=None)
        )

    def commit(self, session: Session, message: protocol.CommitWeights) -> None:
        upload = self._uploads.get(session.number)
        writer = self.state.writer
        if upload is None or writer is None or writer.session != session.number:
            session.fail(message.call, "not_writer", "this session holds no write lock: nothing to commit")
            return
        layout, generation, call = message.layout, writer.generation, message.call
        why = cannot_commit(self._shared.device, layout, upload)
        if why is not None:
            session.fail(call, *why)
            return
        del self._uploads[session.number]
        self.layouts[generation] = layout

        def recorded() -> None:
            if self.state.writer is not None and self.state.writer.generation == generation:
                session.weights_call = call
                self._lost = False
                self.step(machine.Commit(session.number, layout.hash()))
            else:  # it released the lock in the meantime
                self._forget(generation)
                session.fail(call, "aborted", "the write lock was given up before the commit was done")

        self._shared.records.put(f"{PREFIX}{generation}", _encode(layout), upload.fds, recorded)

    def donate(self, session: Session, message: protocol.Donate, fds: list[int]) -> None:
        """Take weights back from an engine after vault and keeper both died. The set must be complete, with its
        hash."""
        upload = session.donation
        upload.fds += fds
        layout = message.layout
        why = self._cannot_donate(layout, upload, last=message.last)
        if why is not None:
            upload.drop()
            session.fail(message.call, *why)
        elif not message.last:
            session.reply(protocol.Done(message.call))
        else:
            self._take_donated(session, message.call, layout, upload.take().fds)

    def _cannot_donate(self, layout: Layout, upload: Upload, *, last: bool) -> Why | None:
        current = self.state.current
        if not self._lost and (current is None or current.layout_hash != layout.hash()):
            here = "nothing" if current is None else current.layout_hash
            return "stale", f"nothing was lost here, and {here} is kept"
        return wrong_donation(self._shared.device, layout, upload, last=last)

    def _take_donated(self, session: Session, call: int, layout: Layout, fds: list[int]) -> None:
        session.weights_call = call
        before = self.state.current
        number = self.state.last_generation + 1
        self.layouts[number] = layout
        self._shared.records.put(f"{PREFIX}{number}", _encode(layout), fds)
        self.step(machine.DonateWeights(session.number, layout.hash()))
        if self.state.current is before or self.state.current is None:
            self._forget(number)  # the vault has the same weights, or new ones are being written

    def release(self, session: Session, message: protocol.ReleaseWeights) -> None:
        self.release_lock(session)
        session.reply(protocol.Done(message.call))

    def release_lock(self, session: Session) -> None:
        session.weights_call = session.weights_granted = 0
        session.generation = None
        self.step(machine.ReleaseLock(session.number))
        session.remember()

    def fetch(self, session: Session, message: protocol.FetchSlabs) -> None:
        generation = self.state.generation_of(session.number)
        if generation is None:
            session.fail(message.call, "not_reader", "this session holds no weights to fetch")
            return
        session.reply_slabs(message.call, list(self.layouts[generation].slab_sizes), self.slabs(generation))

    # -- slabs that leave the device and come back

    def slabs(self, generation: int) -> list[int]:
        return self._shared.records.by_key[f"{PREFIX}{generation}"].fds

    def drop_slabs(self, generation: int, then: Then) -> None:
        """Drop a generation's slabs but keep its layout; call `then` once the keeper has dropped them too."""
        self._shared.records.drop(f"{PREFIX}{generation}", then)

    def record_slabs(self, generation: int, fds: list[int], then: Then) -> None:
        self._shared.records.put(f"{PREFIX}{generation}", _encode(self.layouts[generation]), fds, then)

    # -- events and effects

    def gone(self, session: Session) -> None:
        session.donation.drop()
        self.step(machine.ReleaseLock(session.number))

    def step(self, event: machine.Event) -> None:
        self.state, effects = machine.step(self.state, event, self._shared.now_s())
        self.perform(effects)

    def _carry_out(self, effect: machine.Effect) -> None:
        if isinstance(effect, machine.DropGeneration):
            if self.state.current is None and self.state.superseded:
                self._shared.records.put(GONE, str(self.state.last_generation).encode(), [])
            self._forget(effect.generation)
        elif isinstance(effect, machine.Aborted):
            if (upload := self._uploads.pop(effect.session, None)) is not None:
                upload.drop()
            ended = f"writer of generation {effect.generation} ended before its commit"
            self._shared.note(f"{ended}: nothing of it is kept")
        elif (session := self._shared.sessions.get(effect.session)) is not None:
            self._tell(session, effect)

    def _tell(self, session: Session, effect: machine.Effect) -> None:
        call = session.weights_call
        if not isinstance(effect, machine.TellSuperseded | machine.AskToLetGo):
            session.weights_call = 0
        if isinstance(effect, machine.GrantWrite | machine.GrantRead):
            session.weights_granted = call
        match effect:
            case machine.GrantWrite():
                self._uploads[session.number] = Upload()
                session.reply(protocol.WeightsGranted(call, "rw", effect.generation))
                self._shared.note(f"{session!r} writes generation {effect.generation}")
            case machine.GrantRead():
                layout = self.layouts[effect.generation]
                session.generation = effect.generation
                session.remember()
                session.reply(protocol.WeightsGranted(call, "ro", effect.generation, layout))
            case machine.Committed():
                session.generation = effect.generation
                session.remember()
                session.reply(protocol.Done(call))
                self._shared.note(f"{session!r} committed generation {effect.generation} ({effect.layout_hash})")
            case machine.AnswerEmpty():
                session.reply(protocol.WeightsEmpty(call))
            case machine.LockTimedOut():
                session.reply(protocol.Failed(call, "timeout", "no weights were committed in time"))
            case machine.RefuseLock():
                session.reply(protocol.Failed(call, effect.code, effect.reason))
            case machine.TellSuperseded():
                session.reply(protocol.Superseded(effect.by_hash))
            case machine.AskToLetGo():
                session.reply(protocol.LetGo())

    def _forget(self, generation: int) -> None:
        self.layouts.pop(generation, None)
        self._shared.records.drop(f"{PREFIX}{generation}")
        self._shared.note(f"generation {generation} is dropped")
