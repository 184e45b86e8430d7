"""Reads the frontends' API keys from a file: other users can read a command line, but not the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from holdfast.core.errors import UserError
from holdfast.core.tiers import split_key
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


def first_key(keys: Sequence[str]) -> str:
    """Return the first of the keys, without its tier; "" if there are none."""
    return split_key(keys[0])[0] if keys else ""


def keyed(spec: DeploymentSpec, path: Path | None) -> DeploymentSpec:
    """Return the deployment with the file's keys added; raise UserError if it cannot be read or has none."""
    if path is None:
        return spec
    return replace(spec, frontend=replace(spec.frontend, api_keys=(*spec.frontend.api_keys, *read_keys(path))))


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys in a file, one per line; skip empty lines. Raise UserError if there are none or one is
    invalid."""
    try:
        text = read_small(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api-key-file {path} cannot be read: {error}") from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise UserError(f"--api-key-file {path} holds no key, so that requests would need none; write one key per line")
    check_keys("--api-key-file", keys)
    return keys
