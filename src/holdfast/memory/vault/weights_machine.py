"""Who may write and who may read the weights on one device: a pure machine, no I/O, no clock.

Theory. A *generation* is one committed set of slabs with its layout. One session at a time *writes* a generation
that nobody else can see; its commit makes it the *current* one, which new readers get, and makes the writer its first
reader. A writer that ends before commit leaves what was there before it: nothing, or the committed generation it meant
to replace. Replacing makes a generation beside the old one, so it never delays a reader; the old one is kept until its
last reader has left. Where both do not fit, the old one is *dropped* first: its readers are asked to let go, nobody new
gets it meanwhile, and it goes when the last has; a reader that cannot do without it is not pressed, the wish times out.
Whoever cannot be answered yet waits, and every waiter is judged anew on each change, oldest first.

`TABLE` (weights_state.py) is the whole of admission: what is wished, in which situation, gets which answer.

Always true: at most one writer; a granted generation is a committed one; a waiter that is gone is granted nothing
(facts 17); a waiter is never granted after its deadline; generation numbers grow; a committed generation is dropped
only unread, and superseded or asked to go; `next_deadline` is never in the past after a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from holdfast.memory.vault.weights_state import Answer, Generation, Reader, Weights, Writer, judge
from holdfast.memory.vault.weights_words import (
    Aborted,
    AnswerEmpty,
    Ask,
    Code,
    Commit,
    Committed,
    Donate,
    DropGeneration,
    Effect,
    Event,
    Gone,
    GrantRead,
    GrantWrite,
    LetGo,
    Refuse,
    Release,
    Superseded,
    Tick,
    TimedOut,
)

# The words and the state are to be had here too: a shell needs one import.
__all__ = [
    "Aborted", "AnswerEmpty", "Ask", "Code", "Commit", "Committed", "Donate", "DropGeneration", "Effect", "Event",
    "Generation", "Gone", "GrantRead", "GrantWrite", "LetGo", "Reader", "Refuse", "Release", "Superseded", "Tick",
    "TimedOut", "Weights", "next_deadline", "restore", "step",
]  # fmt: skip

# More than all ranks and standbys a machine can run; past a thousand something is looping, and each step stays short.
WAITERS_MAX = 1024

Step = tuple[Weights, tuple[Effect, ...]]


def restore(
    generations: Iterable[Generation],
    readers: Iterable[Reader] = (),
    last_generation: int = 0,
    refill_from_s: float | None = None,
) -> Step:
    """A new vault's state from the keeper's records; a reader listed here keeps its seat until its `Gone`.

    An unfinished writer has no record: its slabs went with the old vault, and it is told so when it comes back.
    """
    known = sorted(generations, key=lambda generation: generation.number)
    numbers = [generation.number for generation in known]
    assert len(set(numbers)) == len(numbers), f"a generation is recorded twice: {numbers}"
    seats = tuple(readers)
    assert all(reader.generation in numbers for reader in seats), "a reader's generation is not recorded"
    state = Weights(
        last_generation=max([last_generation, *numbers]),
        current=known[-1] if known else None,
        superseded=tuple(known[:-1]),
        readers=seats,
        refill_from_s=refill_from_s,
    )
    return _drop_unread(state)


def next_deadline(state: Weights) -> float | None:
    """When a `Tick` is due, if nothing else happens before."""
    times = [waiter.deadline_s for waiter in state.waiters]
    if state.refill_from_s is not None and state.waiters:
        times.append(state.refill_from_s)
    return min(times, default=None)


def step(state: Weights, event: Event, now_s: float) -> Step:
    """What becomes of an event. Effects are to be carried out in their order."""
    if state.refill_from_s is not None and now_s >= state.refill_from_s:
        state = replace(state, refill_from_s=None)
    state, applied = _apply(state, event)
    # Past its deadline nobody is granted anything; but who asks with no time at all is still judged once.
    state, late = _expire(state, now_s, spare=event if isinstance(event, Ask) else None)
    state, settled = _settle(state)
    state, expired = _expire(state, now_s)
    state, overfull = _bound(state)
    state, dropped = _drop_unread(state)
    return state, applied + late + settled + expired + overfull + dropped


def _apply(state: Weights, event: Event) -> Step:
    match event:
        case Ask():
            return _ask(state, event)
        case Commit():
            return _commit(state, event)
        case Donate():
            return _donate(state, event)
        case Release() | Gone():
            return _leave(state, event.session)
        case Tick():
            return state, ()


def _ask(state: Weights, ask: Ask) -> Step:
    if ask.mode not in ("rw", "drop") and ask.replace is not None:
        return state, (Refuse(ask.session, Code.BAD_REQUEST, f"{ask.mode} replaces nothing: ask for rw"),)
    if ask.mode == "drop" and ask.replace is None:
        return state, (Refuse(ask.session, Code.BAD_REQUEST, "drop takes the hash of what is to go"),)
    if taken := state.place_of(ask.session):
        return state, (Refuse(ask.session, Code.BUSY, f"this session {taken} already"),)
    asked: tuple[Effect, ...] = ()
    if ask.mode == "drop" and state.current is not None and state.current.layout_hash == ask.replace:
        asked = tuple(LetGo(session) for session in state.readers_of(state.current))
    return replace(state, waiters=(*state.waiters, ask)), asked


def _commit(state: Weights, event: Commit) -> Step:
    writer = state.writer
    if writer is None or writer.session != event.session:
        return state, (Refuse(event.session, Code.NOT_WRITER, "this session holds no write lock: nothing to commit"),)
    committed = Generation(writer.generation, event.layout_hash)
    return _become_current(replace(state, writer=None), committed, event.session)


def _become_current(state: Weights, committed: Generation, session: int) -> Step:
    effects: list[Effect] = [Committed(session, committed.number, committed.layout_hash)]
    superseded = state.superseded
    if state.current is not None:
        superseded = (*superseded, state.current)
        effects += [Superseded(reader, committed.layout_hash) for reader in state.readers_of(state.current)]
    readers = (*state.readers, Reader(session, committed.number))
    return replace(state, current=committed, superseded=superseded, readers=readers), tuple(effects)


def _donate(state: Weights, event: Donate) -> Step:
    session = event.session
    if taken := state.place_of(session):
        return state, (Refuse(session, Code.BUSY, f"this session {taken} already"),)
    if state.writer is not None and state.current is None:
        return state, (Refuse(session, Code.STALE, "too late: the weights are being written anew"),)
    if state.current is None:
        number = state.last_generation + 1
        donated = Generation(number, event.layout_hash)
        return _become_current(replace(state, last_generation=number), donated, session)
    if state.current.layout_hash != event.layout_hash:
        return state, (Refuse(session, Code.STALE, f"the weights here are {state.current.layout_hash}"),)
    return _grant_read(state, [session], state.current)


def _leave(state: Weights, session: int) -> Step:
    effects: tuple[Effect, ...] = ()
    if state.writer is not None and state.writer.session == session:
        effects = (Aborted(session, state.writer.generation),)
        state = replace(state, writer=None)
    readers = tuple(reader for reader in state.readers if reader.session != session)
    waiters = tuple(waiter for waiter in state.waiters if waiter.session != session)
    return replace(state, readers=readers, waiters=waiters), effects


def _expire(state: Weights, now_s: float, spare: Ask | None = None) -> Step:
    late = tuple(w for w in state.waiters if w.deadline_s <= now_s and w is not spare)
    if not late:
        return state, ()
    waiters = tuple(waiter for waiter in state.waiters if waiter.deadline_s > now_s or waiter is spare)
    return replace(state, waiters=waiters), tuple(TimedOut(waiter.session) for waiter in late)


def _bound(state: Weights) -> Step:
    """Only an `Ask` adds a waiter, at the end: it is the one there is no room for."""
    if len(state.waiters) <= WAITERS_MAX:
        return state, ()
    *kept, extra = state.waiters
    reason = f"{WAITERS_MAX} sessions wait here already"
    return replace(state, waiters=tuple(kept)), (Refuse(extra.session, Code.TOO_MANY, reason),)


def _drop_unread(state: Weights) -> Step:
    read = {reader.generation for reader in state.readers}
    unread = tuple(generation for generation in state.superseded if generation.number not in read)
    if not unread:
        return state, ()
    kept = tuple(generation for generation in state.superseded if generation.number in read)
    return replace(state, superseded=kept), tuple(DropGeneration(generation.number) for generation in unread)


# -- the waiters, judged anew


def _settle(state: Weights) -> Step:
    """What is to go, goes; the oldest who may write, writes; everyone else is judged by what that made of it."""
    state, effects = _dropped(state)
    writer = next((ask for ask in state.waiters if judge(state, ask) is Answer.WRITE), None)
    if writer is not None:
        state, granted_write = _grant_write(state, writer)
        effects += granted_write
    judged = [(ask, judge(state, ask)) for ask in state.waiters]
    assert all(answer is not Answer.WRITE for _, answer in judged), f"two writers: {state!r}"
    state = replace(state, waiters=tuple(ask for ask, answer in judged if answer is Answer.WAIT))
    if state.current is not None:
        reading = [ask.session for ask, answer in judged if answer is Answer.READ]
        state, granted = _grant_read(state, reading, state.current)
        effects += granted
    effects += [_deny(state, ask, answer) for ask, answer in judged if answer not in (Answer.WAIT, Answer.READ)]
    return state, tuple(effects)


def _dropped(state: Weights) -> tuple[Weights, list[Effect]]:
    ask = next((ask for ask in state.waiters if judge(state, ask) is Answer.DROP), None)
    if ask is None:
        return state, []
    assert state.current is not None
    effects: list[Effect] = [DropGeneration(state.current.number), AnswerEmpty(ask.session)]
    waiters = tuple(waiter for waiter in state.waiters if waiter is not ask)
    return replace(state, current=None, waiters=waiters), effects


def _grant_write(state: Weights, ask: Ask) -> tuple[Weights, list[Effect]]:
    assert state.writer is None, f"two writers: {state!r}"
    number = state.last_generation + 1
    waiters = tuple(waiter for waiter in state.waiters if waiter is not ask)
    state = replace(state, last_generation=number, writer=Writer(ask.session, number, ask.replace), waiters=waiters)
    return state, [GrantWrite(ask.session, number, ask.replace)]


def _grant_read(state: Weights, sessions: Sequence[int], current: Generation) -> Step:
    readers = tuple(Reader(session, current.number) for session in sessions)
    granted = tuple(GrantRead(session, current.number, current.layout_hash) for session in sessions)
    return replace(state, readers=state.readers + readers), granted


def _deny(state: Weights, ask: Ask, answer: Answer) -> Effect:
    if answer is Answer.EMPTY:
        return AnswerEmpty(ask.session)
    here = "nothing is" if state.current is None else f"{state.current.layout_hash} is"
    if answer is Answer.STALE:
        return Refuse(ask.session, Code.STALE, f"asked to replace {ask.replace}, but {here} here")
    assert answer is Answer.COMMITTED, f"{answer} denies nothing"
    return Refuse(ask.session, Code.COMMITTED, f"{here} committed here: replacing it takes its hash")
