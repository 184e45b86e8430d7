"""Where the components of a manifest stand: `{name}-{hash8}/{componentType}[-{subComponentType}]/{endpoint}`.

Always true: the hash covers everything that a component's pods are told, and nothing that they are not: how many there
are, where, and how they are replaced, does not count. A component's peers are found by what they are, in its own
manifest, never by their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.spec.manifest.fleet import Fleet
from holdfast.spec.manifest.parts import EnvVar, Section
from holdfast.spec.manifest.rules import PLANNED
from holdfast.spec.manifest.secrets import Digests, digests_of
from holdfast.spec.manifest.types import DECODE, FRONTEND, PREFILL, WORKER, Manifest, Service
from holdfast.spec.names import namespace_for

NO_DIGESTS: Digests = MappingProxyType({})
COUPLED = {PREFILL: DECODE, DECODE: PREFILL}


@dataclass(frozen=True, slots=True)
class ComponentAddress:
    """Where every replica of one set stands."""

    namespace: str
    component: str

    @property
    def hash8(self) -> str:
        return self.namespace.rpartition("-")[2]

    def endpoint(self, name: str) -> str:
        return f"{self}/{name}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.component}"


def address_of(manifest: Manifest, name: str, digests: Digests = NO_DIGESTS) -> ComponentAddress:
    """Where the service of that name stands; `digests`: of the values of secrets."""
    namespace = namespace_for(manifest.name, _told(manifest, name, digests))
    return ComponentAddress(namespace, manifest.spec.services[name].component)


def peers_of(manifest: Manifest, name: str) -> list[str]:
    """The services that this one works with, request by request: prefill and decode workers of one model."""
    service = manifest.spec.services[name]
    wanted = COUPLED.get(service.sub_component_type) if service.component_type == WORKER else None
    return sorted(
        other
        for other, one in manifest.of_type(WORKER).items()
        if one.sub_component_type == wanted and one.model_name == service.model_name
    )


def variables(manifest: Manifest, service: Service) -> tuple[EnvVar, ...]:
    """What a service's containers have in their environment, besides what the plan sets: of several wishes the nearest
    to the container counts."""
    written = (*manifest.spec.envs, *service.envs, *service.container.env)
    by_name = {variable.name: variable for variable in written if variable.name not in PLANNED}
    return tuple(by_name.values())


def own_digests(manifest: Manifest, service: Service, digests: Digests) -> dict[str, str]:
    """Return the hashes of the values of secrets that the service's containers have."""
    names = {}
    for variable in variables(manifest, service):
        secret = variable.value_from.secret_key_ref if variable.value_from is not None else None
        names[variable.name] = (secret.name, secret.key) if secret is not None else ("", "")
    return digests_of(service, names, digests)


def _told(manifest: Manifest, name: str, digests: Digests) -> dict[str, Any]:
    """All that a service's pods are told, as plain data."""
    service = manifest.spec.services[name]
    plain = Service(service.component_type)
    fleet = Fleet(memory_gib=service.fleet.memory_gib)  # its vaults are told
    kept = replace(service, replicas=plain.replicas, rollout=plain.rollout, fleet=fleet, envs=())
    container = replace(service.container, env=variables(manifest, service))
    said = _said(replace(kept, extra_pod_spec=replace(service.extra_pod_spec, main_container=container)))
    shares = list(manifest.spec.shares) if service.component_type == FRONTEND else []
    secrets = own_digests(manifest, service, digests)
    return {"service": name, "spec": said, "shares": shares, **({"secrets": secrets} if secrets else {})}


def _said(value: Any) -> Any:
    """Plain data without what is as it would be if nobody had said it: a new field changes no old manifest's hash."""
    if isinstance(value, Section):
        fields = msgspec.structs.fields(value)
        return {
            one.encode_name: _said(getattr(value, one.name))
            for one in fields
            if getattr(value, one.name) != one.default
        }
    return [_said(one) for one in value] if isinstance(value, tuple) else value
