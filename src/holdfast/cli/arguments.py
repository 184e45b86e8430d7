"""What a command was asked for: a struct whose fields are its options (`spec.arguments`), and how it is done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from holdfast.settings import Environment
from holdfast.spec.arguments import Options, by_path
from holdfast.spec.settings import Settings, about, filled

Json = Annotated[bool, about("Print JSON.")]
Filename = Annotated[
    Path | None, about("Manifest file; - reads standard input.", flag="--filename", short="-f", once=True)
]


class Asked(Settings, frozen=True):
    """What one command was asked for: fields are its options, and so are those of settings inside it that name the
    command."""

    lasting: ClassVar[bool] = False  # it starts what others start again: a wrong environment is refused for good

    @classmethod
    def of(cls, env: Environment) -> Self:
        """What it does where nothing is said, but for what the environment says."""
        return cls()

    def run(self, env: Environment) -> int:
        """Do it; the exit status. UserError says what is wrong."""
        raise NotImplementedError


def with_values(asked: Asked, options: Options, values: Mapping[str, Any]) -> Asked:
    """`asked` with these values, by flag."""
    return filled(asked, by_path(options, values))
