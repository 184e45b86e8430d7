"""What somebody asked for on the command line or in a file, as settings."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import typer

from holdfast.cli.options import given
from holdfast.spec.settings import Setting, Settings, filled, options_of

S = TypeVar("S", bound=Settings)


def asked(called: typer.Context, command: Callable[..., None], pattern: S) -> tuple[S, list[Setting]]:
    """`pattern` with all that was given, and the settings that were."""
    known = options_of(pattern, command.__name__)
    found = [(known[flag], called.params[name]) for name, flag in given(called, command).items() if flag in known]
    return filled(pattern, {setting.path: _plain(value) for setting, value in found}), [one for one, _ in found]


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return tuple(value) if isinstance(value, list) else value
