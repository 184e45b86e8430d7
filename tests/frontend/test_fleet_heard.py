"""What a frontend reads of a fleet's book: who leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec

from holdfast.core.tasks import beside
from holdfast.fleet.records import Book, book_key
from holdfast.frontend.process import _hear_fleet
from holdfast.streams.roster import Roster
from holdfast.testing.waiting import BOUND_S, until
from served_store import served_store


async def test_who_leaves_is_heard_of_and_what_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    """By the whole book of its own deployment, each time it is written; none, once it is gone."""
    heard: list[tuple[str, tuple[str, ...], str]] = []
    weighing = SimpleNamespace(idle=lambda deployment, names, by: heard.append((deployment, tuple(names), by)))
    roster = cast(Roster, SimpleNamespace(weighing=weighing))
    async with served_store(tmp_path) as (store,), beside(_hear_fleet(store, "d", roster), "fleet"):
        await until(lambda: heard, "the first word")
        for key, value in (
            (book_key("d-more"), msgspec.json.encode(Book(idle=("d-more-m-1",)))),
            (book_key("d"), b"[]"),
            (book_key("d"), msgspec.json.encode(Book(idle=("d-m-1", "d-m-2")))),
        ):
            await store.put(key, value, BOUND_S)
        await until(lambda: len(heard) == 2, "the book")
        await store.delete(book_key("d"), BOUND_S)
        await until(lambda: len(heard) == 3, "its end")
    assert heard == [("d", (), "fleet"), ("d", ("d-m-1", "d-m-2"), "fleet"), ("d", (), "fleet")]
