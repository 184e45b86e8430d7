"""API keys of frontends: from a file, which other users cannot read as they can a command line, and as last used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace

from holdfast.core.errors import UserError
from holdfast.roles.small_files import read_small
from holdfast.spec.deployment import DeploymentSpec
from holdfast.spec.option_checks import check_keys
from holdfast.spec.settings import about

ApiKeyFile = Annotated[
    Path | None,
    about(
        "File with API keys, one per line, as for --api-key (a command line is visible to other users).",
        panel="Serving",
    ),
]


class _Keys(msgspec.Struct):
    """The part of a frontend's settings that says which keys it takes."""

    api_keys: tuple[str, ...] = ()


def api_keys_in(launch: bytes | None) -> tuple[str, ...]:
    """Return the API keys that a frontend was started with, by its settings as the supervisor wrote them down."""
    try:
        return msgspec.json.decode(launch or b"{}", type=_Keys).api_keys
    except msgspec.DecodeError:
        return ()


def keyed(spec: DeploymentSpec, path: Path | None) -> DeploymentSpec:
    """Return the deployment with the keys that the file adds; UserError, if it cannot be read or has none."""
    if path is None:
        return spec
    return replace(spec, frontend=replace(spec.frontend, api_keys=(*spec.frontend.api_keys, *read_keys(path))))


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys in a file, one per line, without empty lines; UserError if there are none, or a wrong one."""
    try:
        text = read_small(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api-key-file {path} cannot be read: {error}") from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise UserError(f"--api-key-file {path} holds no key: that would open it to everyone; write one key per line")
    check_keys("--api-key-file", keys)
    return keys
