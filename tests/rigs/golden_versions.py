"""Frames and records as one version of Holdfast writes them, for `tests/decisions/test_two_versions.py`.

Run with the `src` of a version first on PYTHONPATH: `write FILE` writes the bytes of all samples, `read FILE` decodes
the bytes of a file with that version's types and prints each value as JSON. To record plane-base again:

    git archive 9d58ad23 src | tar x -C DIR && PYTHONPATH=DIR/src python tests/rigs/golden_versions.py write \\
        tests/decisions/golden/plane-base.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.requests import Failure, GenerateRequest, Output, Sampling
from holdfast.discovery.keys import InstanceRecord, LoadingRecord
from holdfast.fleet.records import FleetRecord, NodeRecord, Orders
from holdfast.health.records import ControlRecord, DeviceRecord, HealthRecord, ReportRecord
from holdfast.memory import protocol as vault
from holdfast.rollout.records import DesiredDeployment, HistoryEntry, RolloutStatus
from holdfast.store import messages as store
from holdfast.supervise.records import Record
from holdfast.wire import messages as worker

FRAMES: dict[str, Any] = {
    "worker": worker.Message,
    "store": store.ToServer | store.ToClient,
    "vault": vault.FromClient | vault.Welcome,
}
RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        InstanceRecord, LoadingRecord, FleetRecord, NodeRecord, Orders, ControlRecord, DeviceRecord, HealthRecord,
        ReportRecord, DesiredDeployment, HistoryEntry, RolloutStatus, Record,
    )
}  # fmt: skip
_PROCESS = worker.ProcessIdentity("boot", "ns", 7, 8, 9)
_WORKER_FRAMES = (
    worker.Hello(2, "data", "frontend-1"),
    worker.Welcome(2, 5, "d-0123abcd", "sum", 8, 4, True, _PROCESS, group="g", gpus=(("0000:01", "GPU-1"),)),
    worker.Refused("InvalidRequest", "why"),
    worker.Generate(3, GenerateRequest("r", [1, 2, 3], 2, Sampling(9, 4, temperature=0.5), [2], 1), 6, 100),
    worker.Cancel([1, 2]),
    worker.Step([Output(3, [5, 6]), Output(4, [], failure=Failure("EngineShutdown", "why"))]),
    worker.Closed([3]),
    worker.Draining("asked"),
    worker.Beat(1, 2, 3.0, 4.0, 5.0, 6, 7, 8, 9, 10, 11),
    worker.GetArtefact("aa"),
    worker.ArtefactPart("aa", 0, 2, b"xy"),
    worker.NotTaken("why"),
    worker.Active(3, "doubt"),
    worker.Room(2),
    worker.Pass(4),
    worker.Ping(1),
    worker.Pong(1),
    worker.Reload(1, reason="r"),
    worker.Reloaded(2, "done", True),
    worker.Failing("gone"),
    worker.StepDown(True, "why"),
)
_RECORDS = (
    InstanceRecord("unix:///w", "unix:///b", "sum", 7, "worker-1a", "g"),
    LoadingRecord("worker-1b", "sum", 120.0),
    FleetRecord(by="c", serials={"m": 3}, idle=("d-m-0123abcd-1",), unmet={"m": "no room"}, hopeless=("m",)),
    Orders(by="c", overdue=frozenset({"x"})),
    ControlRecord(name="control", leads=True, pid=3),
    HealthRecord(name="worker-1a", group="g", spare=True, at_unix_s=5.0, by="c"),
    ReportRecord(name="f", at_unix_s=5.0, admitted=("5",), refused={"6": "why"}, waiting=2),
    DesiredDeployment(revision=2, manifest="m", digest="x", serial=4, paused=True),
    HistoryEntry(number=2, manifest="m", digest="x", at_unix_s=1.0, why="w"),
    RolloutStatus(pid=1, host="h", state_dir="/s", serial=4),
    Record("worker-1a", "worker", 7, 8, "unix:///w", deployment="d"),
)


def samples() -> dict[str, tuple[str, Any]]:
    """Return each sample by name, with what decodes it."""
    frames = {"worker": _WORKER_FRAMES, "store": (store.Hello(1), store.Welcome(1), store.PutKey(1, "k", b"v", True))}
    frames["vault"] = (vault.Hello(1, "c", 2, 3), vault.Welcome(1, "cuda:0", "v", True, 4))
    found = {f"{kind}/{type(one).__name__}": (kind, one) for kind, many in frames.items() for one in many}
    return found | {f"record/{type(one).__name__}": ("record", one) for one in _RECORDS}


def encode(value: Any, *, is_record: bool) -> str:
    return msgspec.json.encode(value).decode() if is_record else msgspec.msgpack.encode(value).hex()


def decode(name: str, data: str) -> Any:
    kind, _, what = name.partition("/")
    if kind == "record":
        return msgspec.json.decode(data, type=RECORDS[what])
    return msgspec.msgpack.decode(bytes.fromhex(data), type=FRAMES[kind])


def main(verb: str, path: str) -> None:
    if verb == "write":
        found = {name: encode(one, is_record=kind == "record") for name, (kind, one) in samples().items()}
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
    else:
        read = {name: decode(name, data) for name, data in json.loads(Path(path).read_text()).items()}
        print(msgspec.json.encode({name: msgspec.to_builtins(one) for name, one in read.items()}).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
