"""Computes the addresses of a manifest's components: `{name}-{hash8}/{componentType}[-{subComponentType}]/{endpoint}`.

Always true: the hash covers exactly the settings that a component's pods get, not their number, location or rollout. A
component finds its peers by type, in its own manifest, never by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from holdfast.spec.manifest.fleet import Fleet
from holdfast.spec.manifest.parts import EnvVar, as_plain
from holdfast.spec.manifest.rules import PLANNED
from holdfast.spec.manifest.secrets import Digests, digests_of
from holdfast.spec.manifest.typed import words_of
from holdfast.spec.manifest.types import DECODE, FRONTEND, PREFILL, ROLES, WORKER, Manifest, Service
from holdfast.spec.names import namespace_for

NO_DIGESTS: Digests = MappingProxyType({})
_UNTYPED = dict.fromkeys(ROLES.values())
COUPLED = {PREFILL: DECODE, DECODE: PREFILL}


@dataclass(frozen=True, slots=True)
class ComponentAddress:
    """The address of all replicas of one set."""

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
    """Return the address of a service; `digests`: hashes of secret values."""
    namespace = namespace_for(manifest.name, _pod_inputs(manifest, name, digests))
    return ComponentAddress(namespace, manifest.spec.services[name].component)


def peers_of(manifest: Manifest, name: str) -> list[str]:
    """Return the services that serve each request together with this one: prefill or decode workers of the same
    model."""
    service = manifest.spec.services[name]
    wanted = COUPLED.get(service.sub_component_type) if service.component_type == WORKER else None
    return sorted(
        other
        for other, one in manifest.of_type(WORKER).items()
        if one.sub_component_type == wanted and one.model_name == service.model_name
    )


def variables(manifest: Manifest, service: Service) -> tuple[EnvVar, ...]:
    """Return the environment variables of a service's containers, without those that the plan sets. The container's
    variables override the service's, and the service's override the deployment's."""
    written = (*manifest.spec.envs, *service.envs, *service.container.env)
    by_name = {variable.name: variable for variable in written if variable.name not in PLANNED}
    return tuple(by_name.values())


def own_digests(manifest: Manifest, service: Service, digests: Digests) -> dict[str, str]:
    """Return the hashes of the secret values that the service's containers get."""
    names = {}
    for variable in variables(manifest, service):
        secret = variable.value_from.secret_key_ref if variable.value_from is not None else None
        names[variable.name] = (secret.name, secret.key) if secret is not None else ("", "")
    return digests_of(service, names, digests)


def _pod_inputs(manifest: Manifest, name: str, digests: Digests) -> dict[str, Any]:
    """Return everything that a service's pods get, as plain data."""
    service = manifest.spec.services[name]
    plain = Service(service.component_type)
    fleet = Fleet(memory_gib=service.fleet.memory_gib)  # its vaults get this value
    kept = replace(service, replicas=plain.replicas, rollout=plain.rollout, fleet=fleet, envs=(), **_UNTYPED)
    # Typed settings count as the words that mean the same, so that they may replace `args` without another set.
    words = words_of(service.role, service.given) if service.typed is not None else service.container.args
    container = replace(service.container, env=variables(manifest, service), args=words)
    # Without defaults, so that a new field does not change an old manifest's hash.
    said = as_plain(replace(kept, extra_pod_spec=replace(service.extra_pod_spec, main_container=container)))
    shares = list(manifest.spec.shares) if service.component_type == FRONTEND else []
    secrets = own_digests(manifest, service, digests)
    return {"service": name, "spec": said, "shares": shares, **({"secrets": secrets} if secrets else {})}
