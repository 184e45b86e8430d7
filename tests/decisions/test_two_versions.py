"""Processes of two versions of Holdfast run beside each other: each reads the frames and records that the other wrote.

`golden/plane-base.json` has the bytes that the commit plane-base (docs/decisions.md) wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.discovery.keys import HEALTH, InstanceKey
from holdfast.health.last_resort import WRONG, unfitness_of
from holdfast.health.records import DeviceRecord, HealthRecord
from holdfast.health.standing import HealthCause, restore
from holdfast.rollout.records import read_entry
from holdfast.store.contract import Put
from holdfast.streams.verdicts import WorkerVerdicts
from holdfast.testing.clients import Stream, chat_body
from holdfast.testing.deployment import Deployment
from holdfast.wire import messages
from tests.rigs import golden_versions as golden

PLANE_BASE = "9d58ad23"
GOLDEN = Path(__file__).with_name("golden") / "plane-base.json"
ROOT = Path(__file__).parents[2]
BOUND_S = 120.0


@pytest.mark.parametrize("name", sorted(golden.samples()))
def test_what_the_older_version_wrote_is_read_as_it_was_meant(name: str) -> None:
    """Every field has its value, and fields that came later have their defaults."""
    written = json.loads(GOLDEN.read_text())
    assert golden.decode(name, written[name]) == golden.samples()[name][1]


@pytest.fixture(scope="module")
def plane_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The older version's `src`."""
    found = subprocess.run(["git", "archive", PLANE_BASE, "src"], cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"commit {PLANE_BASE} is not in this checkout's history")
    folder = tmp_path_factory.mktemp("plane-base")
    with tarfile.open(fileobj=BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def read_by(src: Path, file: Path) -> dict[str, Any]:
    """Return the values that another version's types make of a file's bytes."""
    words = [sys.executable, golden.__file__, "read", str(file)]
    run = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(src)}, capture_output=True, timeout=BOUND_S, check=False
    )
    assert run.returncode == 0, run.stderr.decode()
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_what_this_version_writes_is_read_by_the_older_one(plane_base: Path, tmp_path: Path) -> None:
    """Each value is the same in every field that the older one knows; those that came later are skipped."""
    file = tmp_path / "today.json"
    golden.main("write", str(file))
    written: dict[str, str] = json.loads(file.read_text())
    ranges = messages.Hello(2, "data", "frontend-1", 3, ("colour",))
    written["worker/Hello"] = golden.encode(ranges, is_record=False)
    file.write_text(json.dumps(written))
    older, base = read_by(plane_base, file), read_by(plane_base, GOLDEN)
    assert older == base


NEWER = {
    "name": "worker-1a",
    "standing": {"status": 77, "weight": 0.25, "reason": "so", "causes": {"frobbed": "so"}},
    "breaker": {"state": 9, "reason": "x"},
    "news": [1],
}


def test_a_verdict_with_states_of_a_newer_version_counts() -> None:
    """A frontend gives the worker the weight that the record says; a control continues from it and asks for a check."""
    data = msgspec.json.encode(NEWER)
    record = msgspec.json.decode(data, type=HealthRecord)
    assert (record.weight, str(record.standing)) == (0.25, "UNKNOWN (so)")
    assert unfitness_of(record.standing.causes, 1.0) == WRONG
    assert HealthCause.UNCHECKED in restore(record.standing, 10.0).causes
    key, verdicts = InstanceKey("d-0123abcd", "worker", "generate", 1), WorkerVerdicts("d")
    verdicts.on_store_event(HEALTH, Put(HEALTH + key.path, data))
    share = verdicts.share(key, trusted=False, since_s=0.0, now_s=1.0)
    assert (share.weight, share.status) == (0.25, "UNKNOWN")


def test_a_value_of_a_newer_version_is_kept() -> None:
    """A record with it is read, and written again as it was."""
    fault = msgspec.json.decode(b'{"severity":"singed","reason":"x"}', type=DeviceRecord)
    assert fault.severity.name == "UNKNOWN"
    assert json.loads(msgspec.json.encode(fault))["severity"] == "singed"
    entry = read_entry("k", b'{"number":1,"manifest":"m","digest":"d","at_unix_s":1.0,"fate":"parked","news":1}')
    assert entry is not None
    assert str(entry.result) == "parked"


TOKENS_MAX = 8000  # at 25 ms each: more than a busy machine needs for both kills


class Mixed(Deployment):
    """A deployment in which some processes run another version."""

    def __init__(self, src: Path, older: frozenset[str]) -> None:
        super().__init__(workers=2, sim={"ttft_ms": 5, "tpot_ms": 25})
        self._src, self._older = src, older

    def start_role(self, role: str, name: str, settings: dict[str, Any]) -> None:
        ours = self.env.get("PYTHONPATH")
        if name in self._older:
            self.env["PYTHONPATH"] = str(self._src)
        super().start_role(role, name, settings)
        self.env.pop("PYTHONPATH", None)
        if ours is not None:
            self.env["PYTHONPATH"] = ours

    def busy(self) -> str:
        """Return the worker that has the stream; "" if none has."""
        for name in self.worker_names:
            try:
                if self.worker_facts(name)["streams"]:
                    return name
            except OSError:
                continue
        return ""


OLDER = ({"worker-0"}, {"worker-0", "frontend"}, {"store", "worker-1", "frontend"})


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("older", OLDER, ids=lambda names: " ".join(sorted(names)))
def test_a_stream_moves_between_versions_token_for_token(plane_base: Path, older: set[str]) -> None:
    """From one version's worker to the other's by SIGKILL, and back, with a frontend and a store of either version."""

    def body(tokens: int) -> dict[str, Any]:
        return chat_body("a story", tokens, seed=7, return_token_ids=True)

    with Mixed(plane_base, frozenset(older)) as deployment:
        stream, ran_on = Stream(deployment.port, body(TOKENS_MAX)), []
        for _ in range(2):
            stream.wait_tokens(len(stream.so_far().tokens) + 20)
            ran_on.append(deployment.busy())
            deployment.kill(ran_on[-1])
            deployment.start_worker(ran_on[-1])
            deployment.wait_until(lambda: len(deployment.ready_workers()) == 2, "both workers to serve again")
        answer = stream.wait_tokens(len(stream.so_far().tokens) + 20).so_far()
        assert sorted(ran_on) == ["worker-0", "worker-1"], "each version had it"
        assert deployment.health()["resumed_total"] == 2
        expected = Stream(deployment.port, body(len(answer.tokens))).answer()
    assert (expected.wrong, expected.resumed) == ("", 0)
    assert answer.tokens == expected.tokens
