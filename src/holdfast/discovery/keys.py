"""Keys in the store, and the namespaces that keep deployments and their generations apart.

`v1/instances/{namespace}/{component}/{endpoint}/{instance:x}` and `v1/mdc/…`. A namespace is
`{deployment}-{8 hex}`; a frontend of deployment `foo` admits exactly `foo-` and 8 hex digits, so it never
captures `foo-bar-…` (facts 19). A prefix of the store is a string's: whoever watches a key without a `/` behind it
hears of `foo-bar` where it asked for `foo`, and looks at the whole key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

INSTANCES = "v1/instances/"
STANDBYS = "v1/standbys/"  # engines that stand by: known, connected to, never routed to
LOADINGS = "v1/loading/"  # engines that are loading, leased: LoadingRecord; they may take over from then on
CARDS = "v1/mdc/"
REFUSALS = "v1/refused/"
# What control decides, and from what. No lease: a verdict outlives whoever gave it.
HEALTH = "v1/health/"  # + an instance's path: health.records.HealthRecord
LEVELS = "v1/level/"  # + deployment: routing.degradation.LevelRecord
EXPECTED = "v1/expected/"  # + deployment/ + a name of the key: health.expectations.Record
# What devices said of themselves. No lease either: it is so until the device was mended.
FAULTS = "v1/faults/"  # + deployment/ + boot id/PCI address: health.records.DeviceRecord
# What should run and what becomes of it (`rollout.records`). No lease.
DEPLOYMENTS = "v1/deployments/"  # + deployment: what is wanted
ROLLOUTS = "v1/rollouts/"  # + deployment: the rollout's memory
HISTORY = "v1/history/"  # + deployment/ + revision: what became of it
# The fleet (`fleet.records`). No lease.
MODELS = "v1/models/"  # + deployment/ + the model's key: what is wanted of it
ORDERS = "v1/orders/"  # + deployment/ + node: what is asked of it
FLEETS = "v1/fleets/"  # + deployment: what its controller must not forget
KILLS = "v1/kills/"  # + a token: streams.kills.Kill; there for seconds; + /peer, leased: streams.kills.Answer
# Leased.
REPORTS = "v1/reports/"  # + deployment/ + the frontend's peer name: health.records.Report
STEWARDS = "v1/stewards/"  # + deployment: rollout.steward.Steward
NODES = "v1/nodes/"  # + deployment/ + node: fleet.records.NodeRecord
CONTROLS = "v1/controls/"  # + deployment/ + the control's name-hex: health.records.ControlRecord

# As `InstanceKey.path` writes it and no other way, so that an instance has one key.
_HEX = re.compile(r"0|[1-9a-f][0-9a-f]{0,15}")
_SET = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class InstanceKey:
    """Where one instance stands in the store."""

    namespace: str
    component: str
    endpoint: str
    instance: int

    @property
    def path(self) -> str:
        return f"{self.namespace}/{self.component}/{self.endpoint}/{self.instance:x}"

    @property
    def deployment(self) -> str:
        return deployment_of(self.namespace)


def parse_key(prefix: str, key: str) -> InstanceKey | None:
    """The instance a key under `prefix` speaks of, or None if it is not such a key."""
    parts = key.removeprefix(prefix).split("/")
    if not key.startswith(prefix) or len(parts) != 4 or not _HEX.fullmatch(parts[3]):
        return None
    return InstanceKey(parts[0], parts[1], parts[2], int(parts[3], 16))


def deployment_of(namespace: str) -> str:
    """Whose set stands there; "": nobody's."""
    deployment, _, set_id = namespace.rpartition("-")
    return deployment if _SET.fullmatch(set_id) else ""


def admits(deployment: str, namespace: str) -> bool:
    """Whether a frontend that serves `deployment` serves workers in `namespace`."""
    return bool(deployment) and deployment_of(namespace) == deployment


class InstanceRecord(msgspec.Struct, frozen=True):
    """The value under an instance's key: how to reach it."""

    address: str
    beat_address: str
    checksum: str
    pid: int = 0
    name: str = ""  # as `holdfast ps` calls it
    group: str = ""  # engines of one group take over from each other


class LoadingRecord(msgspec.Struct, frozen=True):
    """The value under the key of an engine that is loading."""

    name: str
    checksum: str  # of its model's card
    within_s: float  # it is ready within so many seconds, or ends


def encode_loading(record: LoadingRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_loading(data: bytes) -> LoadingRecord:
    return _loading_decoder.decode(data)


def encode_record(record: InstanceRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> InstanceRecord:
    return _record_decoder.decode(data)


_record_decoder = msgspec.json.Decoder(InstanceRecord)
_loading_decoder = msgspec.json.Decoder(LoadingRecord)
