"""Defines a pod independently of where it runs: its containers with their settings, probes and shared resources.

`init` containers start first, one after the other: each waits until the previous one has passed its startup probe. They
keep running beside the others. Then all of `containers` start together.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.spec.manifest.parts import GRACE_S
from holdfast.spec.manifest.typed import words_of


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the plain data of a pod."""


class Variable(Plain, frozen=True):
    name: str
    value: str = ""
    secret: str = ""  # name of a secret; with `key`, instead of a value
    key: str = ""
    optional: bool = False  # the secret may be missing
    field: str = ""  # field of its own pod, instead of a value


class Port(Plain, frozen=True):
    name: str
    number: int


class Question(Plain, frozen=True):
    """A probe: a page that must answer 200, or a command that must succeed."""

    path: str = ""
    port: str = ""  # by name or number
    command: tuple[str, ...] = ()
    delay_s: int = 0
    period_s: int = 10
    timeout_s: int = 1
    failures_max: int = 3

    @property
    def bound_s(self) -> int:
        """Return how long the probe may fail (s)."""
        return self.delay_s + self.period_s * self.failures_max


class Mount(Plain, frozen=True):
    volume: str
    path: str


class Container(Plain, frozen=True):
    name: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()  # typed, by flag, instead of args
    working_dir: str = ""
    # Variables set by the plan. A machine where pods share network and disk replaces them with its own values.
    planned: tuple[Variable, ...] = ()
    env: tuple[Variable, ...] = ()  # from the manifest
    env_from_secret: str = ""
    digests: tuple[tuple[str, str], ...] = ()  # hashes of the secret values of its set
    ports: tuple[Port, ...] = ()
    mounts: tuple[Mount, ...] = ()
    claims: tuple[str, ...] = ()  # names of the pod's claims
    gpus: int = 0  # exclusive GPUs; those of a claim are shared
    startup: Question | None = None
    liveness: Question | None = None
    readiness: Question | None = None
    restart: str = "always"

    @property
    def words(self) -> tuple[str, ...]:
        """Return the whole command line, also where its settings are typed."""
        return (*self.command, *self.args, *(words_of(self.command[1], dict(self.settings)) if self.settings else ()))


class Claim(Plain, frozen=True):
    """Devices shared by all containers of a pod that name this claim."""

    name: str
    gpus: int


class Pod(Plain, frozen=True):
    """The template of one service's replicas."""

    name: str  # name of the set; a replica's name adds its number
    service: str
    component_type: str
    namespace: str
    component: str
    replicas: int
    containers: tuple[Container, ...]
    init: tuple[Container, ...] = ()
    volumes: tuple[str, ...] = ()  # empty at the start, shared by its containers, removed with the pod
    claims: tuple[Claim, ...] = ()
    grace_s: int = GRACE_S  # SIGTERM to SIGKILL

    def replica(self, number: int) -> str:
        return f"{self.name}-{number}"
