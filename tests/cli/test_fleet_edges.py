"""The fleet's commands with what a newcomer types: values that cannot be, nobody who reads, and a store that was
started again a moment ago."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.cli.fleet import observed
from holdfast.core.errors import REFUSED
from holdfast.fleet.records import node_key
from tests.rigs.cli.fleet_terminal import SIM, Desk, desk_at, eventually, replica


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """With a model of which one is wanted, and there."""
    async with desk_at(tmp_path) as made:
        assert (await made.say("deploy", "tiny", *SIM)).returncode == 0
        await made.node("n1", [replica(await made.desired("tiny"), 1)])
        yield made


async def test_a_number_below_zero_is_no_option(desk: Desk) -> None:
    """It is refused as what it is; a word that is none is still an option."""
    told = await desk.say("scale", "tiny", "-1")
    assert (told.returncode, told.stderr) == (REFUSED, "holdfast: replicas must be 0 to 256, got -1\n"), told
    told = await desk.say("scale", "tiny", "-x")
    assert (told.returncode, "`holdfast scale` has no option -x" in told.stderr) == (2, True), told


async def test_what_is_empty_is_a_variable_that_was_not_set(desk: Desk) -> None:
    """No node is meant by it."""
    told = await desk.say("node", "--node", "")
    assert (told.returncode, "--node is empty; is a variable unset?" in told.stderr) == (REFUSED, True), told
    for node in ("", "a/b", "é"):
        told = await desk.say("deploy", "other", *SIM, "--node", node)
        assert (told.returncode, f"--node: no node is called {node!r}" in told.stderr) == (REFUSED, True), told
    assert await desk.find_desired("other") is None
    told = await desk.say("queue")
    assert (told.returncode, "--store only works with --kill" in told.stderr) == (2, True), told


@pytest.mark.parametrize(
    "words",
    [
        ("models", "nobody"),
        ("models", "--nonsense"),
        ("scale", "nobody", "1"),
        ("scale", "tiny", "-1"),
        ("scale", "tiny", "9"),
        ("evict", "tiny", "r9"),
        ("evict", "nobody", "--wait"),
        ("nodes", "--deployment", "nobody"),
        ("events", "--follow", "--deployment", "nobody"),
        ("deploy", "é", *SIM),
        ("deploy", "more", *SIM, "--served-name", "tiny"),
        ("queue", "--kill", ""),
    ],
)
async def test_an_error_is_a_document_too(desk: Desk, words: tuple[str, ...]) -> None:
    """With --json a program reads the line that a person does; without, nothing is on standard output."""
    told = await desk.say(*words, "--json")
    assert told.returncode != 0
    assert told.stderr.endswith(f"holdfast: {told.object['error']}\n")
    assert told.stdout.count("\n") == 1
    assert (await desk.say(*words)).stdout == ""


async def test_who_waits_in_vain_gets_one_document(desk: Desk) -> None:
    """How it was at the end, and no second one that says why: the line does."""
    told = await desk.say("deploy", "large", *SIM, "--memory-gib", "99", "--wait", "--json")
    assert (told.returncode, told.object["key"], told.object["hot"]) == (1, "large", 0), told
    assert "holdfast: large: " in told.stderr


@pytest.mark.parametrize("words", [("events", "--follow"), ("models", "--watch", "--json"), ("nodes", "--watch")])
async def test_nobody_who_reads_ends_it(desk: Desk, words: tuple[str, ...]) -> None:
    """`| head -1`: status 1 without a word, though nothing happens that would be told."""
    command = (sys.executable, "-m", "holdfast", *words, "--store", desk.url)
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE, "env": desk.env}
    process = await asyncio.create_subprocess_exec(*command, **pipes)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60.0)
        process.stdout._transport.close()  # type: ignore[attr-defined]
        assert await asyncio.wait_for(process.wait(), 60.0) == 1
        assert await process.stderr.read() == b""
    finally:
        if process.returncode is None:
            process.kill()


async def test_a_store_that_was_started_again_is_given_the_time_to_hear_of_nodes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows what is wanted at once, and what is there when nodes have told it: nobody is called missing before."""
    monkeypatch.setattr(observed, "FOUND_S", 60.0)
    key = node_key("local", "n1")
    held = await desk.store.get(key, 10.0)
    assert held is not None
    await desk.store.delete(key, 10.0)
    asked = asyncio.create_task(desk.say("models", "tiny", "--json"))
    await asyncio.sleep(0.3)
    assert not asked.done()
    await desk.store.put(key, held, 10.0)
    told = await asyncio.wait_for(asked, 60.0)
    assert json.loads(told.stdout)["hot"] == 1, told


async def test_none_there_is_told_all_the_same(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a moment."""
    monkeypatch.setattr(observed, "FOUND_S", 0.1)
    await desk.store.delete(node_key("local", "n1"), 10.0)

    async def is_told() -> bool:
        return "no node of local is there" in (await desk.say("models")).stdout

    await eventually(is_told, "the lack of a node")
