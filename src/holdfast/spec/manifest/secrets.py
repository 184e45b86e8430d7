"""Secrets of a manifest: which values its containers refer to, and the names under which their hashes are kept. Pure.

A reference is written `SECRET/KEY`, or `$VARIABLE` for a variable that containers inherit from the environment of
`holdfast up`. A revision holds the hash of the value of each reference, so that another value is another set and rolls
out like any change; the values stay on the machine that runs the deployment (`supervise.secrets`).

Always true: a container whose required secret is missing is refused, never started without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from holdfast.spec.manifest.rules import PLANNED, variables_in
from holdfast.spec.manifest.types import FRONTEND, PLANNER, WORKER, Manifest, Service

Digests = Mapping[str, str]  # hash of a value, by its reference

# Variables that guard something and that containers inherit, by the types of component that read them.
INHERITED = {"HOLDFAST_API_KEYS": (FRONTEND,), "HOLDFAST_ENGINE_TOKEN": (WORKER, PLANNER)}


class SecretSource(Protocol):
    """Where the values of secrets are looked for on this machine."""

    @property
    def directory(self) -> str:
        """The directory with one folder per secret and one file per key."""

    def read(self, secret: str, key: str) -> str | None:
        """Return the value in the secret's file for the key; None: there is no such file."""

    def keys(self, secret: str) -> tuple[str, ...] | None:
        """Return the keys of the secret; None: there is no such folder."""

    def last(self, reference: str) -> str | None:
        """Return the value that the deployment was last asked for with; None: none is known."""

    def kept(self, digest: str) -> str | None:
        """Return the value with this hash; None: it is not kept here."""


def reference(secret: str, key: str) -> str:
    return f"{secret}/{key}"


def inherited(variable: str) -> str:
    return f"${variable}"


def refers(manifest: Manifest) -> bool:
    """Return whether a container of the manifest refers to a secret."""
    variables = (one.value_from for _, one in variables_in(manifest))
    return any(one is not None and one.secret_key_ref is not None for one in variables) or any(
        service.env_from_secret for service in manifest.spec.services.values()
    )


def keys_in(secret: str, digests: Digests) -> tuple[str, ...]:
    """Return the keys of the secret that are among the references."""
    return tuple(one.removeprefix(f"{secret}/") for one in digests if one.startswith(f"{secret}/"))


def digests_of(service: Service, names: Mapping[str, tuple[str, str]], digests: Digests) -> dict[str, str]:
    """Return the hashes that concern one service. `names`: by variable, the secret and key that it refers to, or two
    empty strings where the manifest writes its value."""
    wanted = {reference(*one) for one in names.values() if one[0]}
    given = set(names)
    if service.env_from_secret:
        keys = keys_in(service.env_from_secret, digests)
        wanted |= {reference(service.env_from_secret, key) for key in keys}
        given |= set(keys)
    wanted |= {
        inherited(name) for name, types in INHERITED.items() if service.component_type in types and name not in given
    }
    return {one: digests[one] for one in sorted(wanted) if one in digests}


def values_of(manifest: Manifest, source: SecretSource, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the value of every reference of the manifest that is found on this machine."""
    found: dict[str, str] = {}
    for one, variable, secret, key in _references(manifest, source):
        value = value_of(source, environ, secret, key, variable)
        if value is not None:
            found[one] = value
    return found


def value_of(
    source: SecretSource, environ: Mapping[str, str], secret: str, key: str, variable: str
) -> str | None:
    """Return a value as it is now: the secret's file, else the variable of `holdfast up`, else what the deployment was
    last asked for with."""
    if secret and (value := source.read(secret, key)) is not None:
        return value
    if variable and variable in environ:
        return environ[variable]
    return source.last(reference(secret, key) if secret else inherited(variable))


def _references(manifest: Manifest, source: SecretSource) -> Iterator[tuple[str, str, str, str]]:
    """Yield reference, variable, secret and key of every value that a container of the manifest may refer to."""
    for _, variable in variables_in(manifest):
        ref = variable.value_from.secret_key_ref if variable.value_from is not None else None
        if ref is not None:
            yield reference(ref.name, ref.key), variable.name, ref.name, ref.key
    for service in manifest.spec.services.values():
        secret = service.env_from_secret
        for key in (source.keys(secret) or ()) if secret else ():
            if key not in PLANNED:
                yield reference(secret, key), "", secret, key
    for name in INHERITED:
        yield inherited(name), name, "", ""
