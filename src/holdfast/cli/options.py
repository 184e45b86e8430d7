"""What the subcommands share: the environment, read once per command."""

from __future__ import annotations

from holdfast.core.errors import UserError
from holdfast.settings import Environment, read_environment


def environment() -> Environment:
    """What the environment says; a wrong variable is the person's to mend."""
    try:
        return read_environment()
    except ValueError as error:
        raise UserError(str(error)) from error
