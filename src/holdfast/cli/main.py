"""The `holdfast` command's first lines: refuse what cannot work, then hand over to `cli.app`.

Always true: a person's mistake ends in one line on stderr, never in a traceback, and in status 2 for words that make no
sense, 78 where trying again cannot help, else 1. A character that the terminal's encoding does not have costs its
looks, never the command; an output that cannot be written is such a line, a reader that left is status 1 without one.
With `--json` the line is on standard output too, as `{"error": "…"}`, unless a document stands there already.
What is imported before the version check must load on any Python 3.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
from typing import TextIO

USAGE = 2  # words that make no sense
INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
NAME = "holdfast-plain"
PLAIN = {"…": "...", "·": "-", "–": "-", "—": "-", "×": "x", "→": "->", "’": "'"}


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - run from a source tree, pip has checked nothing
        found = ".".join(map(str, sys.version_info[:2]))
        sys.exit(f"holdfast: needs Python 3.11 or newer, this is {found}; make a venv with a newer one")
    open_what_is_closed()
    soften_output()
    from holdfast.cli.app import run
    from holdfast.cli.terminal import has_written, write_begins, write_out
    from holdfast.core.errors import UserError, exit_status
    from holdfast.spec.arguments import UsageError

    write_begins()
    try:
        status = run(sys.argv[1:])
        write_out()  # what was shown and could not be, too
    except UserError as error:
        told = " ".join(str(error).split())
        with contextlib.suppress(OSError):
            print(f"holdfast: {told}", file=sys.stderr, flush=True)
        if {"--json", "--json=true"} & {*sys.argv[1:]} and not has_written():
            with contextlib.suppress(OSError, UserError):
                write_out(json.dumps({"error": told}) + "\n")
        status = USAGE if isinstance(error, UsageError) else exit_status(error)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # who read what it says has gone
        status = 1
    let_go(sys.stdout)
    let_go(sys.stderr)
    sys.exit(status)


def let_go(stream: TextIO) -> None:
    """What cannot be written is left: else the interpreter would fail at its own last flush."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_what_is_closed() -> None:
    """Who starts us without a standard file (`>&-`) gets /dev/null there: else a lock or a socket would take its
    number, and be lost where a child is given its own."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the lowest number that is free is this one
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def plain(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: what stands in for what cannot be encoded."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end


def soften_output() -> None:
    """Let standard output and error replace what their encoding does not have, where they would refuse it."""
    codecs.register_error(NAME, plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # else it is somebody's own, who decides for himself
            stream.reconfigure(errors=NAME)
