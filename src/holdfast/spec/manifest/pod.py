"""A pod as any substrate carries it out: containers in their order, what they are told, asked and share.

`init` containers are started first, one after the other, each when the one before it has passed its startup probe; they
run on beside the others. All of `containers` start together then.
"""

from __future__ import annotations

import msgspec

GRACE_S = 60  # SIGTERM to SIGKILL, where nobody says


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Plain data that processes and clusters are handed."""


class Variable(Plain, frozen=True):
    name: str
    value: str = ""
    secret: str = ""  # whose `key` it has, in place of a value
    key: str = ""
    optional: bool = False  # whether it may be missing
    field: str = ""  # of its own pod, which it has in place of a value


class Port(Plain, frozen=True):
    name: str
    number: int


class Question(Plain, frozen=True):
    """One kind of probe: a page that must answer 200, or a command that must succeed."""

    path: str = ""
    port: str = ""  # by name or number
    command: tuple[str, ...] = ()
    delay_s: int = 0
    period_s: int = 10
    timeout_s: int = 1
    failures_max: int = 3

    @property
    def bound_s(self) -> int:
        """How long it may fail."""
        return self.delay_s + self.period_s * self.failures_max


class Mount(Plain, frozen=True):
    volume: str
    path: str


class Container(Plain, frozen=True):
    name: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...] = ()
    working_dir: str = ""
    # What the plan sets itself. A machine whose pods share one network and one disk puts its own values in their place.
    planned: tuple[Variable, ...] = ()
    env: tuple[Variable, ...] = ()  # what the manifest says
    env_from_secret: str = ""
    digests: tuple[tuple[str, str], ...] = ()  # hashes of the values of secrets that its set was asked for with
    ports: tuple[Port, ...] = ()
    mounts: tuple[Mount, ...] = ()
    claims: tuple[str, ...] = ()  # of the pod's, by name
    gpus: int = 0  # of its own; those of a claim are shared
    startup: Question | None = None
    liveness: Question | None = None
    readiness: Question | None = None
    restart: str = "always"

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.command, *self.args)


class Claim(Plain, frozen=True):
    """Devices that all containers of a pod that name it share."""

    name: str
    gpus: int


class Pod(Plain, frozen=True):
    """What every replica of one service is."""

    name: str  # of the set; a replica's has its number behind it
    service: str
    component_type: str
    namespace: str
    component: str
    replicas: int
    containers: tuple[Container, ...]
    init: tuple[Container, ...] = ()
    volumes: tuple[str, ...] = ()  # empty at first, shared by its containers, gone with the pod
    claims: tuple[Claim, ...] = ()
    grace_s: int = GRACE_S  # SIGTERM to SIGKILL

    def replica(self, number: int) -> str:
        return f"{self.name}-{number}"
