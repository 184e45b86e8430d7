"""Who waits in the line of a worker set, request by request, and where a request is whose streams are known. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.states import State, Waiting


def waiting_state(workers: WorkerSet) -> State:
    """Of those who wait for a place in it."""
    if workers.table.routable_count:
        return State.QUEUED
    return State.HELD if workers.withheld else State.PROVISIONING


def line_of(workers: WorkerSet, *, wanted: bool, why: str = "") -> Iterator[tuple[Flight, Waiting]]:
    """All who are held, in order, each with the place of the request that it is part of. Who came when its wanted model
    was there already waits for a place like anybody else, and may yet be refused. `why`: no worker comes."""
    state, places = waiting_state(workers), dict[int, int]()
    for held in workers.holds:
        place = places.setdefault(id(held.item.consumer.asker), len(places) + 1)
        waits_for_its_model = state is not State.QUEUED or held.since_s < workers.served_since_s
        told = why if state is not State.QUEUED else ""
        yield held.item, Waiting(state, place, held.since_s, wanted and waits_for_its_model, told)


def state_of(flights: Iterable[Flight]) -> State:
    """Of a request that is not over; one whose streams are all over is being read by its client."""
    open_ones = [flight for flight in flights if not flight.ledger.ended]
    placed = [flight for flight in open_ones if flight.slot is not None]
    if not open_ones or any(flight.ledger.emitted for flight in placed):
        return State.RUNNING
    return State.DISPATCHED if placed else waiting_state(open_ones[0].workers)
