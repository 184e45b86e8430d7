"""Resolves a manifest's secrets: the values that its containers refer to, and the hashes of these values. No I/O.

A reference is written `SECRET/KEY`, or `$VARIABLE` for a variable that containers inherit from the environment of
`holdfast up`. A revision holds the hash of each referenced value, so that a new value makes a new set, which rolls out
like any change. The values themselves stay on the machine that runs the deployment (`supervise.secrets`).

Always true: a container with a missing required secret is refused, never started without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import Refused
from holdfast.spec.manifest.pod import Container, Variable
from holdfast.spec.manifest.rules import PLANNED, variables_in
from holdfast.spec.manifest.types import FRONTEND, PLANNER, WORKER, Manifest, Service

Digests = Mapping[str, str]  # reference -> hash of its value

# Variables for access control that containers inherit, and the component types that read them.
INHERITED = {"HOLDFAST_API_KEYS": (FRONTEND,), "HOLDFAST_ENGINE_TOKEN": (WORKER, PLANNER)}


class SecretSource(Protocol):
    """Finds the values of secrets on this machine."""

    @property
    def directory(self) -> str:
        """Return the directory, which has one folder per secret and one file per key."""

    def read(self, secret: str, key: str) -> str | None:
        """Return the value in the secret's file for the key; None: there is no such file."""

    def keys(self, secret: str) -> tuple[str, ...] | None:
        """Return the keys of the secret; None: there is no such folder."""

    def last(self, reference: str) -> str | None:
        """Return the value at the last apply of the deployment; None: unknown."""

    def kept(self, digest: str) -> str | None:
        """Return the value with this hash; None: this machine does not store it."""


def reference(secret: str, key: str) -> str:
    return f"{secret}/{key}"


def inherited(variable: str) -> str:
    return f"${variable}"


def refers(manifest: Manifest) -> bool:
    """Return True if a container of the manifest refers to a secret."""
    variables = (one.value_from for _, one in variables_in(manifest))
    return any(one is not None and one.secret_key_ref is not None for one in variables) or any(
        service.env_from_secret for service in manifest.spec.services.values()
    )


def keys_in(secret: str, digests: Digests) -> tuple[str, ...]:
    """Return the keys of the secret among the references."""
    return tuple(one.removeprefix(f"{secret}/") for one in digests if one.startswith(f"{secret}/"))


def digests_of(service: Service, names: Mapping[str, tuple[str, str]], digests: Digests) -> dict[str, str]:
    """Return the hashes for one service. `names`: variable -> the secret and key that it refers to, or two empty
    strings if its value is in the manifest."""
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
    """Return the value of every reference of the manifest that this machine has."""
    found: dict[str, str] = {}
    for one, variable, secret, key in _references(manifest, source):
        value = value_of(source, environ, secret, key, variable)
        if value is not None:
            found[one] = value
    return found


def value_of(source: SecretSource, environ: Mapping[str, str], secret: str, key: str, variable: str) -> str | None:
    """Return the current value: from the secret's file, else from the environment of `holdfast up`, else from the last
    apply."""
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
        for key in _keys_now(source, secret) if secret else ():
            if key not in PLANNED:
                yield reference(secret, key), "", secret, key
    for name in INHERITED:
        yield inherited(name), name, "", ""


def _keys_now(source: SecretSource, secret: str) -> tuple[str, ...]:
    """Return the keys of a whole secret. If the file of a variable for access control is missing, the variable keeps
    its last value (a rotation may be under way); only another manifest removes it."""
    keys = source.keys(secret)
    if keys is None:
        return ()  # refused later, when the container is made
    guards = (name for name in INHERITED if name not in keys and source.last(reference(secret, name)) is not None)
    return (*keys, *guards)


@dataclass(frozen=True, slots=True)
class SecretValues:
    """The variables that a manifest gives one container on this machine, with the values of its secrets."""

    container: Container
    source: SecretSource | None  # None: the container starts on another machine, with its secrets
    environ: Mapping[str, str]  # of `holdfast up`
    state_dir: Path

    def variables(self) -> dict[str, str]:
        """Return the manifest's variables for the container; raise Refused if a secret is missing. Variables from
        fields of a pod are left out: they are inherited or unset."""
        said = self._whole_secret(self.container.env_from_secret) if self.container.env_from_secret else {}
        for variable in self.container.env:
            if variable.secret:
                value = self._value(variable.secret, variable.key, variable.name)
                if value is not None:
                    said[variable.name] = value
                elif self.source is not None and not variable.optional:
                    raise Refused(self._missing(variable))
            elif not variable.field:
                said[variable.name] = variable.value
        return said

    def inherited(self) -> dict[str, str]:
        """Return the variables of `holdfast up`, with the values that the container's set was made with."""
        known = [(one, digest) for one, digest in self.container.digests if one.startswith("$")]
        return {one.removeprefix("$"): self._kept(one, digest) for one, digest in known}

    def _whole_secret(self, secret: str) -> dict[str, str]:
        """Return all keys of a secret with their values, by variable."""
        if self.source is None:
            return {}
        keys = keys_in(secret, dict(self.container.digests)) or self.source.keys(secret)
        if keys is None:
            folder = f"{self.source.directory}/{secret}"
            raise Refused(f"envFromSecret: the secret {secret!r} is missing: make {folder} with one file per key")
        values = {key: self._value(secret, key, "") for key in keys if key not in PLANNED}
        return {key: value for key, value in values.items() if value is not None}

    def _value(self, secret: str, key: str, variable: str) -> str | None:
        if self.source is None:
            return None
        one, digests = reference(secret, key), dict(self.container.digests)
        if one in digests:
            return self._kept(one, digests[one])
        return value_of(self.source, self.environ, secret, key, variable)

    def _kept(self, one: str, digest: str) -> str:
        value = self.source.kept(digest) if self.source is not None else None
        if value is None:
            what = f"the value of {one} that this set was asked for with is not kept in {self.state_dir}"
            raise Refused(f"{what}; `holdfast apply -f FILE` asks again, with the value of now")
        return value

    def _missing(self, variable: Variable) -> str:
        assert self.source is not None
        where = f"the file {self.source.directory}/{variable.secret}/{variable.key}"
        return (
            f"{variable.name} needs the key {variable.key!r} of the secret {variable.secret!r}, and it is missing: "
            f"looked for {where} and for the variable {variable.name} in the environment of this command; "
            "write the file, set the variable, or say optional: true to start without it"
        )
