"""Defines the base of all commands: a struct with the command's options as fields (`spec.arguments`) and a method to
run it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from holdfast.settings import Environment
from holdfast.spec.arguments import Options, by_path
from holdfast.spec.settings import Settings, about, filled

OUTPUT = ("--output", "-o")
Json = Annotated[
    bool, about("Output format; --json means -o json.", valued=OUTPUT, values={"table": False, "json": True})
]
Filename = Annotated[
    Path | None, about("Manifest file; - reads standard input.", flag="--filename", short="-f", once=True)
]


class CommandOptions(Settings, frozen=True):
    """A command: its options are its fields, and the fields of settings inside it that name the command."""

    lasting: ClassVar[bool] = False  # a service manager may restart it, so an invalid environment exits with status 78

    @classmethod
    def of(cls, env: Environment) -> Self:
        """Return the command with its default options, as the environment sets them."""
        return cls()

    def run(self, env: Environment) -> int:
        """Run the command and return its exit status. Raise UserError with the reason if it fails."""
        raise NotImplementedError


def with_values(pattern: CommandOptions, options: Options, values: Mapping[str, Any]) -> CommandOptions:
    """Return `pattern` with these values by flag."""
    return filled(pattern, by_path(options, values))
