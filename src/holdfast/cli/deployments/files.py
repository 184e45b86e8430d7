"""A manifest that a person names with `-f`: read, and checked for where it is to run.

Always true: every mistake is told, each on a line of its own, before anything is done; so is what does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from holdfast.cli.terminal import Terminal
from holdfast.core.errors import Refused, UserError
from holdfast.roles.devices import shows_gpus
from holdfast.roles.small_files import read_small
from holdfast.rollout.records import AskedManifest
from holdfast.spec.arguments import UsageError
from holdfast.spec.manifest.checking import check, text_of
from holdfast.spec.manifest.rules import Rules
from holdfast.spec.manifest.secrets import SecretSource
from holdfast.spec.manifest.types import Manifest
from holdfast.spec.manifest.yaml_text import BYTES_MAX


@dataclass(frozen=True, slots=True)
class Written:
    """A manifest that can be, and its text."""

    text: str
    manifest: Manifest
    secret_digests: Mapping[str, str] = field(default_factory=dict)  # hashes of the values of its secrets, by reference

    @property
    def asked(self) -> AskedManifest:
        return AskedManifest.of(self.text, self.manifest, self.secret_digests)


@dataclass(frozen=True, slots=True)
class Said:
    """What a file has, unread."""

    name: str
    data: bytes


def read_manifest(
    said: Said, state_dir: Path, environ: Mapping[str, str], source: SecretSource | None = None
) -> Written:
    """One that is to run on this machine. Refused says that it cannot be, after every mistake was told. `source`: None
    where another machine may run it."""
    from holdfast.spec.manifest.local import Machine
    from holdfast.spec.manifest.whole import findings, full_gpus, without_effect

    machine = Machine(state_dir, environ, secret_source=source)
    hints: Rules = (without_effect, partial(full_gpus, machine=machine)) if shows_gpus() else (without_effect,)
    return shaped(said, (partial(findings, machine=machine),), hints)


def said_in(command: str, file: Path | None) -> Said:
    if file is None:
        raise UsageError(f"`holdfast {command}` needs -f FILE: the manifest, or - for standard input")
    return Said("standard input" if str(file) == "-" else str(file), _read(file))


def shaped(said: Said, more: Rules = (), hints: Rules = (), *, hushed: Collection[str] = ()) -> Written:
    """One that can be, wherever it runs; who only looks needs no more. `hushed`: paths whose warnings do not hold."""
    checked = check(said.data, more, hints)
    terminal = Terminal(sys.stderr)
    for warning in (one for one in checked.warnings if one.path not in hushed):
        terminal.line(f"{said.name}: warning: {warning}", "yellow")
    for problem in checked.problems:
        terminal.line(f"{said.name}: {problem}", "red")
    if checked.manifest is None:
        count = len(checked.problems)
        raise Refused(f"{said.name} cannot be used: {count} {'mistake' if count == 1 else 'mistakes'}")
    return Written(text_of(said.data, checked.manifest), checked.manifest)


def _read(file: Path) -> bytes:
    if str(file) == "-":
        return sys.stdin.buffer.read(BYTES_MAX + 1)
    try:
        return read_small(file)
    except OSError as error:
        raise UserError(f"-f {file} cannot be read: {error.strerror}") from error
