"""The weights of one device, as the vault serves them: the lock machine's effects carried out.

Always true: no reader gets a generation that was not committed, and no commit is acknowledged before the keeper has it;
host slabs are sealed by the vault itself before that; an uncommitted writer's slabs are in no record.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.memory.devices.fds import is_host
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, close_all
from holdfast.memory.layout import Layout
from holdfast.memory.protocol import (
    AddSlabs,
    AskWeights,
    CommitWeights,
    Donate,
    Done,
    Failed,
    Slabs,
    Superseded,
    WeightsEmpty,
    WeightsGranted,
)
from holdfast.memory.vault_uploads import Budget, Upload, Why, cannot_seal, wrong_count, wrong_slab
from holdfast.memory.weights_machine import next_deadline, restore, step
from holdfast.memory.weights_state import Generation, Reader, Weights
from holdfast.memory.weights_words import (
    Aborted,
    AnswerEmpty,
    Ask,
    Commit,
    Committed,
    DropGeneration,
    Effect,
    Event,
    Gone,
    GrantRead,
    GrantWrite,
    Refuse,
    Release,
    Tick,
    TimedOut,
)
from holdfast.memory.weights_words import Donate as DonateEvent
from holdfast.memory.weights_words import Superseded as SupersededEffect

if TYPE_CHECKING:
    from holdfast.memory.kept import KeptRecords
    from holdfast.memory.sessions import Session

PREFIX = "weights/"
# A wait may be long (a large model loads for minutes), but never for ever.
TIMEOUT_MS_MAX = 24 * 3600 * 1000

_decode_layout = msgspec.msgpack.Decoder(Layout).decode
_encode = msgspec.msgpack.Encoder().encode


class VaultWeights:
    """Tag `weights`."""

    def __init__(
        self,
        device: str,
        budget: Budget,
        kept: KeptRecords,
        sessions: dict[int, Session],
        clock: Callable[[], float],
        note: Callable[[str], None],
    ) -> None:
        self._device = device
        self._budget = budget
        self._kept = kept
        self._sessions = sessions
        self._clock = clock
        self._note = note
        self.state = Weights()
        self.layouts: dict[int, Layout] = {}  # by generation
        self._uploads: dict[int, Upload] = {}  # by session
        self._lost = False  # everything, and nobody has written anew: who still maps the weights may give them back

    # -- the vault's life

    def adopt(self, readers: list[Reader], refill_from_s: float | None) -> None:
        """Take over what the keeper had; with `refill_from_s` it had lost things, and mappers may give them back."""
        generations = []
        for key, record in self._kept.records.items():
            if key.startswith(PREFIX):
                number = int(key.removeprefix(PREFIX))
                self.layouts[number] = _decode_layout(record.blob)
                generations.append(Generation(number, self.layouts[number].hash()))
        self._lost = refill_from_s is not None and not generations
        known = {generation.number for generation in generations}
        seats = [reader for reader in readers if reader.generation in known]
        self.state, effects = restore(generations, seats, refill_from_s=None if generations else refill_from_s)
        self._perform(effects)

    def kept_bytes(self) -> int:
        committed = sum(sum(layout.slab_sizes) for layout in self.layouts.values())
        return committed + sum(sum(upload.sizes) for upload in self._uploads.values())

    def deadline_s(self) -> float | None:
        return next_deadline(self.state)

    # -- calls

    def ask(self, session: Session, message: AskWeights) -> None:
        if message.mode not in ("rw", "ro", "rw_or_ro"):
            session.fail(message.call, "bad_request", f"mode {message.mode!r}; use rw, ro or rw_or_ro")
            return
        if session.weights_call:
            session.fail(message.call, "busy", "this session waits for the weights already")
            return
        timeout_ms = min(max(0, message.timeout_ms), TIMEOUT_MS_MAX)
        session.weights_call = message.call
        mode = message.mode
        deadline_s = self._clock() + timeout_ms / 1000
        self.step(Ask(session.number, mode, deadline_s, message.wait_for_writer, message.replace))  # type: ignore[arg-type]

    def add_slabs(self, session: Session, message: AddSlabs, fds: list[int]) -> None:
        """Take a writer's slabs; refused ones are closed and change nothing."""
        why = self._cannot_add(session, message.sizes, fds)
        if why is not None:
            close_all(fds)
            session.fail(message.call, *why)
            return
        upload = self._uploads[session.number]
        upload.sizes += message.sizes
        upload.fds += fds
        session.reply(Done(message.call))

    def _cannot_add(self, session: Session, sizes: list[int], fds: list[int]) -> Why | None:
        upload = self._uploads.get(session.number)
        if upload is None:
            return "not_writer", "only the session that holds rw hands over slabs"
        return (
            wrong_count(upload, sizes, fds)
            or self._budget.exceeded(sizes)
            or wrong_slab(self._device, sizes, fds, sealed=None)
        )

    def commit(self, session: Session, message: CommitWeights) -> None:
        upload = self._uploads.get(session.number)
        writer = self.state.writer
        if upload is None or writer is None or writer.session != session.number:
            session.fail(message.call, "not_writer", "this session holds no write lock: nothing to commit")
            return
        layout, generation, call = message.layout, writer.generation, message.call
        why = self._cannot_commit(layout, upload)
        if why is not None:
            session.fail(call, *why)
            return
        del self._uploads[session.number]
        self.layouts[generation] = layout

        def kept() -> None:
            if self.state.writer is not None and self.state.writer.generation == generation:
                session.weights_call = call
                self._lost = False
                self.step(Commit(session.number, layout.hash()))
            else:  # it let go meanwhile
                self._forget(generation)
                session.fail(call, "aborted", "the write lock was given up before the commit was done")

        self._kept.put(f"{PREFIX}{generation}", _encode(layout), upload.fds, kept)

    def _cannot_commit(self, layout: Layout, upload: Upload) -> Why | None:
        if list(layout.slab_sizes) != upload.sizes:
            return "bad_layout", f"the layout's slabs are not the {len(upload.sizes)} handed over"
        if (problem := layout.problem()) is not None:
            return "bad_layout", problem
        return cannot_seal(self._device, upload.fds)

    def donate(self, session: Session, message: Donate, fds: list[int]) -> None:
        """Everything was lost here: a mapped engine gives its set back, complete and with its hash, or not at all."""
        upload = session.donation = session.donation or Upload()
        upload.fds += fds
        layout = message.layout
        why = self._cannot_donate(layout, upload, last=message.last)
        if why is not None:
            session.donation = None
            close_all(upload.fds)
            session.fail(message.call, *why)
        elif not message.last:
            session.reply(Done(message.call))
        else:
            session.donation = None
            self._take_donated(session, message.call, layout, upload.fds)

    def _cannot_donate(self, layout: Layout, upload: Upload, *, last: bool) -> Why | None:
        current = self.state.current
        if len(upload.fds) > len(layout.slab_sizes):
            return "bad_donation", f"{len(upload.fds)} descriptors came for {len(layout.slab_sizes)} slabs"
        if (problem := layout.problem()) is not None:
            return "bad_donation", problem
        if not self._lost and (current is None or current.layout_hash != layout.hash()):
            return "stale", f"nothing was lost here, and {'nothing' if current is None else current.layout_hash} is kept"
        if not last:
            return None
        if len(upload.fds) < len(layout.slab_sizes):
            return "bad_donation", f"only {len(upload.fds)} of {len(layout.slab_sizes)} slabs came"
        return wrong_slab(self._device, list(layout.slab_sizes), upload.fds, sealed=True)

    def _take_donated(self, session: Session, call: int, layout: Layout, fds: list[int]) -> None:
        session.weights_call = call
        before = self.state.current
        number = self.state.last_generation + 1
        self.layouts[number] = layout
        self._kept.put(f"{PREFIX}{number}", _encode(layout), fds, lambda: None)
        self.step(DonateEvent(session.number, layout.hash()))
        if self.state.current is before or self.state.current is None:
            self._forget(number)  # the same weights were here already, or they are being written anew

    def release(self, session: Session, call: int) -> None:
        self.step(Release(session.number))
        session.weights_call = 0
        session.generation = None
        session.remember()
        session.reply(Done(call))

    def fetch(self, session: Session, call: int) -> None:
        """Descriptors of what this session reads, in as few frames as can be."""
        generation = self.state.generation_of(session.number)
        if generation is None:
            session.fail(call, "not_reader", "this session holds no weights to fetch")
            return
        record = self._kept.records[f"{PREFIX}{generation}"]
        sizes = list(self.layouts[generation].slab_sizes)
        for start in range(0, max(1, len(sizes)), FDS_PER_FRAME_MAX):
            end = start + FDS_PER_FRAME_MAX
            session.reply(Slabs(call, sizes[start:end], more=end < len(sizes)), record.fds[start:end])

    # -- events and effects

    def gone(self, session: Session) -> None:
        if session.donation is not None:
            close_all(session.donation.fds)
            session.donation = None
        self.step(Gone(session.number))

    def tick(self) -> None:
        self.step(Tick())

    def step(self, event: Event) -> None:
        self.state, effects = step(self.state, event, self._clock())
        self._perform(effects)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, DropGeneration):
                self._forget(effect.generation)
            elif isinstance(effect, Aborted):
                self._abort(effect)
            else:
                session = self._sessions.get(effect.session)
                if session is not None:
                    self._tell(session, effect)

    def _tell(self, session: Session, effect: Effect) -> None:
        call = session.weights_call
        if not isinstance(effect, SupersededEffect):
            session.weights_call = 0
        if isinstance(effect, GrantWrite | GrantRead):
            session.weights_granted = call
        match effect:
            case GrantWrite():
                self._uploads[session.number] = Upload()
                session.reply(WeightsGranted(call, "rw", effect.generation))
                self._note(f"{session!r} writes generation {effect.generation}")
            case GrantRead():
                layout = self.layouts[effect.generation]
                session.generation = effect.generation
                session.remember()
                session.reply(WeightsGranted(call, "ro", effect.generation, layout))
            case Committed():
                session.generation = effect.generation
                session.remember()
                session.reply(Done(call))
                self._note(f"{session!r} committed generation {effect.generation} ({effect.layout_hash})")
            case AnswerEmpty():
                session.reply(WeightsEmpty(call))
            case TimedOut():
                session.reply(Failed(call, "timeout", "nobody committed weights in time"))
            case Refuse():
                session.reply(Failed(call, effect.code, effect.reason))
            case SupersededEffect():
                session.reply(Superseded(effect.by_hash))

    def _abort(self, effect: Aborted) -> None:
        upload = self._uploads.pop(effect.session, None)
        if upload is not None:
            close_all(upload.fds)
        self._note(f"writer of generation {effect.generation} ended before its commit: nothing of it is kept")

    def _forget(self, generation: int) -> None:
        self.layouts.pop(generation, None)
        self._kept.drop(f"{PREFIX}{generation}")
        self._note(f"generation {generation} is dropped")

    def slab_checksum(self, place: int) -> str | None:
        """Over one slab of the current host weights, read without mapping it."""
        if self.state.current is None or not is_host(self._device):
            return None
        fd = self._kept.records[f"{PREFIX}{self.state.current.number}"].fds[place]
        digest = hashlib.blake2b(digest_size=16)
        offset = 0
        while piece := os.pread(fd, 1024 * 1024, offset):
            digest.update(piece)
            offset += len(piece)
        return digest.hexdigest()
