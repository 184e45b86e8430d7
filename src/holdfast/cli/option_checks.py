"""Values of options that are refused before anything starts, each in one line that names the option.

Always true: what was given, on the command line or in a file, is looked at; our own defaults are not.
"""

from __future__ import annotations

import math
import re

import typer

from holdfast.core.errors import Refused

# In names of files and sockets, in a shell and in `ps`: nothing to quote, and no way out of the directory.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def finite(called: typer.Context, given: typer.CallbackParam, value: float | None) -> float | None:
    """No option means for ever by infinity, and neither infinity nor NaN can be written into a process's settings."""
    if value is not None and not math.isfinite(value):
        raise Refused(f"{_flag(given)} must be a finite number, got {value:g}")
    return value


def deployment_name(called: typer.Context, given: typer.CallbackParam, value: str) -> str:
    """One that is empty is a variable that was not set: it must not become another deployment's."""
    from holdfast.spec.names import check_deployment_name

    if _is_given(called, given):
        try:
            check_deployment_name(value)
        except ValueError as error:
            raise Refused(f"{_flag(given)}: {error}") from error
    return value


def process_name(called: typer.Context, given: typer.CallbackParam, value: str) -> str:
    """Files and sockets are called by it."""
    if _is_given(called, given) and not _NAME.fullmatch(value):
        mend = "must be 1-63 letters, digits, '.', '_' and '-', and begin with a letter or digit"
        raise Refused(f"{_flag(given)} {value!r} {mend}")
    return value


def _is_given(called: typer.Context, given: typer.CallbackParam) -> bool:
    source = called.get_parameter_source(given.name or "")
    return source is not None and source.name != "DEFAULT"


def _flag(given: typer.CallbackParam) -> str:
    return f"--{(given.name or '').replace('_', '-')}"
