"""Keys in the store, and the namespaces that keep deployments and their generations apart.

`v1/instances/{namespace}/{component}/{endpoint}/{instance:x}` and `v1/mdc/…`. A namespace is `{deployment}-{8 hex}`; a
frontend of deployment `foo` admits exactly `foo-` and 8 hex digits, so it never captures `foo-bar-…` (facts 19). The
store's watches match string prefixes: a watch of `foo` without a trailing `/` also gets events of `foo-bar`, so the
watcher must check the whole key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

INSTANCES = "v1/instances/"
STANDBYS = "v1/standbys/"  # engines that stand by: known, connected to, never routed to
LOADINGS = "v1/loading/"  # engines that are loading, leased: LoadingRecord; once loaded they may take over
CARDS = "v1/mdc/"
REFUSALS = "v1/refused/"
# Control's decisions and their basis. No lease: a verdict outlives the control process that gave it.
HEALTH = "v1/health/"  # + an instance's path: health.records.HealthRecord
LEVELS = "v1/level/"  # + deployment: routing.degradation.LevelRecord
EXPECTED = "v1/expected/"  # + deployment/ + a name of the key: health.expectations.Record
# Faults that devices reported. No lease either: a fault remains until the device is repaired.
FAULTS = "v1/faults/"  # + deployment/ + boot id/PCI address: health.records.DeviceRecord
# The desired state and its rollouts (`rollout.records`). No lease.
DEPLOYMENTS = "v1/deployments/"  # + deployment: the desired state
ROLLOUTS = "v1/rollouts/"  # + deployment: the rollout's state, private to supervisors and commands
TRAFFIC = "v1/traffic/"  # + deployment: rollout.traffic.TrafficRecord, for frontends
HISTORY = "v1/history/"  # + deployment/ + revision: its outcome
# The fleet (`fleet.records`). No lease.
MODELS = "v1/models/"  # + deployment/ + the model's key: its desired state
ORDERS = "v1/orders/"  # + deployment/ + node: the node's orders
FLEETS = "v1/fleets/"  # + deployment: its controller's persistent state
CORDONS = "v2/cordons/"  # + deployment/ + node: fleet.desired.Cordon
KILLS = "v1/kills/"  # + a token, for seconds: streams.kills.KillRequest; + /peer, leased: streams.kills.KillAnswer
# Leased.
REPORTS = "v1/reports/"  # + deployment/ + the frontend's peer name: health.records.ReportRecord
ROLLOUT_STATUS = "v1/stewards/"  # + deployment: rollout.records.RolloutStatus
NODES = "v1/nodes/"  # + deployment/ + node: fleet.records.NodeRecord
CONTROLS = "v1/controls/"  # + deployment/ + the control's name-hex: health.records.ControlRecord

# Exactly the form that `InstanceKey.path` writes, so that an instance has only one key.
_HEX = re.compile(r"0|[1-9a-f][0-9a-f]{0,15}")
_SET = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class InstanceKey:
    """The parts of one instance's key in the store."""

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
    """Return the instance of a key under `prefix`; None if it is no instance's key."""
    parts = key.removeprefix(prefix).split("/")
    if not key.startswith(prefix) or len(parts) != 4 or not _HEX.fullmatch(parts[3]):
        return None
    return InstanceKey(parts[0], parts[1], parts[2], int(parts[3], 16))


def deployment_of(namespace: str) -> str:
    """Return the deployment of a worker set's namespace; "" if it has none."""
    deployment, _, set_id = namespace.rpartition("-")
    return deployment if _SET.fullmatch(set_id) else ""


def admits(deployment: str, namespace: str) -> bool:
    """Return whether a frontend that serves `deployment` serves workers in `namespace`."""
    return bool(deployment) and deployment_of(namespace) == deployment


class InstanceRecord(msgspec.Struct, frozen=True):
    """The value under an instance's key: how to reach it."""

    address: str
    beat_address: str
    checksum: str
    pid: int = 0
    name: str = ""  # as `holdfast status` shows it
    group: str = ""  # engines of one group take over from each other


class LoadingRecord(msgspec.Struct, frozen=True):
    """The value under the key of an engine that is loading."""

    name: str
    checksum: str  # of its model's card
    within_s: float  # the engine is ready within so many seconds, or ends


decode_record = msgspec.json.Decoder(InstanceRecord).decode
decode_loading = msgspec.json.Decoder(LoadingRecord).decode
