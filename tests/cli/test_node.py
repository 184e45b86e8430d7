"""`holdfast node join`: whom it refuses to join, with what is to be done about it. What it does is in tests/roles."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.cli.deployments import book
from holdfast.cli.fleet import node
from tests.rigs.cli.fleet_terminal import Desk, desk_at


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    """In a folder whose path is short: a node's own stands below it, with sockets."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as folder:
        async with desk_at(Path(folder)) as made:
            yield made


async def test_a_name_that_somebody_has_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node elsewhere only its lease tells that it lives, so that is waited for; nothing is left running."""
    monkeypatch.setattr(node, "LEASE_S", 0.1)
    told = await desk.say("node", "--node", "n1", "--node-gib", "1")
    assert (told.returncode, told.stderr) == (
        1,
        "holdfast: local has a node n1 (pid 7 on here); choose another name with --node\n",
    )
    assert not (desk.folder / "state").exists(), "nothing is left of who is refused"


async def test_which_fleet_is_joined(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there, a store that is not, and names that cannot be, are told in one line each."""
    monkeypatch.setattr(book, "ANSWER_S", 0.2)
    for words, why in (
        (("--deployment", "lokal"), "there is no fleet 'lokal'; did you mean local?"),
        (("--node", "a/b"), "--node: 'a/b' must be 1-63 letters, digits, '.', '_' and '-'"),
    ):
        told = await desk.say("node", "--node", "n2", "--node-gib", "1", *words)
        assert (told.returncode, why in told.stderr) == (1, True), told
    away = ("--store", f"unix://{desk.folder}/away")
    nobody = await desk.say("node", "--node", "n2", "--node-gib", "1", *away, store=False)
    assert (nobody.returncode, "no answer within 0.2 s" in nobody.stderr) == (1, True), nobody
    nowhere = await desk.say("node", "--node", "n2", store=False)
    assert (nowhere.returncode, "or name a store with --store" in nowhere.stderr) == (1, True), nowhere
    assert not (desk.folder / "state").exists()


async def test_who_is_not_here_is_not_stopped_or_shown(desk: Desk) -> None:
    """`down` and `ps` of a node name one that was started here."""
    for command in ("down", "ps"):
        told = await desk.say(command, "--node", "n9", store=False)
        assert (told.returncode, told.stderr) == (1, "holdfast: no node 'n9' was started here\n"), told
