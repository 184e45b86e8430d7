"""What each kind of process is started with: plain data, so that a supervisor can write it down and start it again."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.discovery.keys import namespace_for
from holdfast.memory.devices.fds import is_host
from holdfast.spec.waits import WAKE_S

ENGINES = ("sim", "torch")


class SimLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sim engine's settings (`engines.sim.SimSettings`)."""

    ttft_ms: float = 50.0
    tpot_ms: float = 20.0
    jitter: float = 0.10
    concurrency: int = 256
    queue: int = 256
    block_size: int = 16
    kv_blocks: int = 65_536
    context_tokens_max: int = 32_768
    vault_gib: float = 0.0625
    ranks: int = 1
    poison_token: int = -1


class TorchLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The torch engine's settings (`engines.torch.settings.TorchSettings`)."""

    exact: bool = False
    kv_gib: float = 0.0
    block_tokens: int = 16
    context_tokens_max: int = 0
    concurrency: int = 0
    queue: int = 256
    step_tokens_max: int = 0
    threads: int = 0
    ranks: int = 1


class StoreLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state_dir: str
    address: str  # unix:// or tcp://
    name: str = "store"
    parent: int = 0  # die with this process; 0: live on
    log_level: str = "info"


class VaultLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A vault with its keeper (`memory.vault.launch.VaultProcesses`), for one device."""

    state_dir: str
    device: str  # host-1, or a GPU's UUID
    socket_path: str
    budget_bytes: int = 0  # 0: what there is
    name: str = "vault"
    parent: int = 0
    log_level: str = "info"


class WorkerLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state_dir: str
    store: str
    deployment: str
    name: str = "worker"
    engine: str = "sim"
    model: str = "holdfast-sim"
    address: str = "tcp://127.0.0.1:0"
    beat_address: str = "tcp://127.0.0.1:0"
    status_address: str = "tcp://127.0.0.1:0"
    drain_s: float = 5.0
    allow_chaos: bool = False
    sim: SimLaunch = SimLaunch()
    parent: int = 0
    log_level: str = "info"
    vault_socket: str = ""  # the vault its memory is in; empty: memory of its own
    vault_uids: tuple[int, ...] = ()  # whose vault it may be, besides this user's and root's
    device: str = "host-0"
    engine_id: int = 0
    lock: str = ""  # the election's lock; set: it stands by until it has it
    lock_token: str = ""  # for a lock server over TCP
    group: str = ""  # shared by the engines that take over from each other
    standby: str = "mapped"  # or "unmapped": give the addresses' contents up while standing by
    kv: str = "vault"  # or "direct": KV in memory of its own, lost with it
    wake_s: float = WAKE_S
    load_s: float = 7200.0  # for its model to be loaded
    starting_ready: bool = False  # what probes are answered while it loads
    health_endpoints: tuple[str, ...] = ()
    engine_token: str = ""  # for `POST /engine/…` from anywhere
    core_dumps: bool = False
    source: str = "default"  # what a torch engine loads: default, tiny, or a path
    cache_dir: str = ""  # where fetched models are kept
    torch: TorchLaunch = TorchLaunch()
    # The memory plan's: who else has memory of its own on the device, and how many pairs share it.
    standbys: int = 0
    device_pairs: int = 1
    # (vault's socket, device) of the ranks after the first, whose are `vault_socket` and `device`.
    more_vaults: tuple[tuple[str, str], ...] = ()
    chat_template: str = ""  # a file in place of the model's own template
    advertise: str = ""  # the host that others reach it at; empty: the one it listens on
    status_any: bool = False  # where another has that port, take any: it is a wish of ours, not of a person

    def namespace(self) -> str:
        """Where its instances stand: the same for every worker that would answer alike."""
        settings: dict[str, Any] = {"engine": self.engine, "model": self.model}
        if self.engine == "sim":
            settings |= {"sim": self.sim}
        else:  # a GPU rounds otherwise
            settings |= {"torch": self.torch, "source": self.source, "on": "cpu" if is_host(self.device) else "gpu"}
        if self.chat_template:
            settings |= {"chat_template": self.chat_template}
        settings = msgspec.to_builtins(settings)
        return namespace_for(self.deployment, settings)


class FrontendLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state_dir: str
    store: str
    deployment: str
    name: str = "frontend"
    address: str = "tcp://127.0.0.1:8000"
    api_keys: tuple[str, ...] = ()
    hold_s: float = 30.0
    body_bytes_max: int = 16 * 1024 * 1024
    drain_s: float = 30.0
    parent: int = 0
    log_level: str = "info"
    request_s: float = 30.0  # for a client to send its request
    unread_s: float = 300.0  # for a client that does not read
    access_log: bool = False  # a line in its log for every request
    status_address: str = ""  # its own pages, beside a port that several share
    queue_s: float = 5.0  # for a new request where every worker is full
    stand_in_after_s: float = 10.0  # a set gone this long may be replaced by one with the same tokenizer, inexact
    models: tuple[str, ...] = ()  # known from the start: asked for before a worker came, they are waited for
    known_s: float = 3600.0  # how long a model whose last worker went is answered 503, not 404
    cors_origins: tuple[str, ...] = ()  # of web pages that may ask; "*": any


Launch = StoreLaunch | VaultLaunch | WorkerLaunch | FrontendLaunch

ROLES: dict[str, type[Launch]] = {
    "store": StoreLaunch,
    "vault": VaultLaunch,
    "worker": WorkerLaunch,
    "frontend": FrontendLaunch,
}


def role_of(launch: Launch) -> str:
    return next(role for role, kind in ROLES.items() if isinstance(launch, kind))
