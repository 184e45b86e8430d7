"""Which call goes where: one table of what a client may say after its hello."""

from __future__ import annotations

from holdfast.memory import protocol
from holdfast.memory.vault.pool import VaultPool
from holdfast.memory.vault.sessions import Session
from holdfast.memory.vault.warm import VaultWarm
from holdfast.memory.vault.weights import VaultWeights


def dispatch(
    weights: VaultWeights, pool: VaultPool, warm: VaultWarm, session: Session, message: object, fds: list[int]
) -> None:
    """Descriptors belong to whoever takes them; a call that has none gets none."""
    match message:
        case protocol.AskWeights():
            weights.ask(session, message)
        case protocol.AddSlabs():
            weights.add_slabs(session, message, fds)
        case protocol.CommitWeights():
            weights.commit(session, message)
        case protocol.ReleaseWeights():
            weights.release(session, message.call)
        case protocol.FetchSlabs():
            weights.fetch(session, message.call)
        case protocol.Donate():
            weights.donate(session, message, fds)
        case protocol.Demote():
            warm.demote(session, message.call)
        case protocol.Promote():
            warm.promote(session, message.call)
        case protocol.Mapping():
            pool.join(session, message)
        case protocol.AcquirePool():
            pool.acquire(session, message)
        case protocol.AddPoolSlabs():
            pool.add_slabs(session, message, fds)
        case protocol.FetchPool():
            pool.fetch(session, message.call)
        case protocol.Quiesced():
            pool.quiesce(session, message)
        case protocol.DonatePool():
            pool.donate(session, message, fds)
        case protocol.CancelCall():
            _cancel(weights, pool, session, message)
        case protocol.Leave():
            session.leaving = True
        case _:
            session.fail(0, "bad_request", "a Hello comes once")


def _cancel(weights: VaultWeights, pool: VaultPool, session: Session, message: protocol.CancelCall) -> None:
    """A wait was given up; where its answer has crossed this on the way, what it granted is given up too."""
    waiting = message.waiting
    if waiting and waiting in (session.weights_call, session.weights_granted):
        weights.let_go(session)
    elif waiting and waiting == session.pool_call:
        pool.cancel(session)
    elif waiting and waiting == session.pool_granted:
        pool.give_up(session)
    session.reply(protocol.Done(message.call))
