"""Every manifest in examples/ runs as it is shipped, with real processes, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import pytest

from holdfast.rollout.records import change_desired, deleted
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.types import WORKER, Manifest
from holdfast.supervise.replicas import replica_id_of
from tests.rigs.roles.kept_manifest import WAIT_S, Kept

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.long]
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
TOKENS = 8


def read(path: Path) -> tuple[str, Manifest]:
    text = path.read_text()
    manifest = check(text.encode()).manifest
    assert manifest is not None
    return text, manifest


def models(manifest: Manifest) -> list[str]:
    """Of which there are any, by the names that clients ask for."""
    there = [service for service in manifest.of_type(WORKER).values() if service.replicas]
    return sorted({service.model_name or "holdfast-sim" for service in there})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
async def test_an_example_runs_as_it_is(path: Path) -> None:
    """All its replicas come to serve, each of its models is listed and answers; deleted, none of its processes is left,
    and its supervisor has nothing more to keep."""
    text, manifest = read(path)
    with Kept() as site:
        async with site.kept(text) as rolling:
            await site.in_place(rolling, 1)
            here = Counter(one.service for one in rolling.state.replicas.values() if one.counted)
            wanted = {name: service.replicas for name, service in manifest.spec.services.items() if service.replicas}
            assert here == wanted
            status, page = await asyncio.to_thread(site.get, "/v1/models")
            assert (status, sorted(one["id"] for one in json.loads(page)["data"])) == (200, models(manifest))
            for model in models(manifest):
                stream = site.stream("hello", TOKENS, model=model, return_token_ids=True)
                answer = await asyncio.to_thread(stream.answer)
                assert (answer.wrong, len(answer.tokens)) == ("", TOKENS), site.told
            await change_desired(site.store, manifest.name, deleted(manifest.name, time.time()))
            await asyncio.wait([site.task], timeout=WAIT_S)
            assert site.task.done(), site.told
            left = [name for name in site.supervisor.slots if replica_id_of(name, manifest.name, ()) is not None]
            assert (left, site.told[-1]) == ([], f"{manifest.name} was deleted, and is gone")
