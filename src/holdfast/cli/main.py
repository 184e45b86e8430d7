"""Starts the `holdfast` command: prepares the standard files, calls `cli.app`, and reports errors.

Always true:
- A user's mistake ends in one line on stderr, never in a traceback.
- The exit status is 2 for a usage error, 78 if trying again cannot help, else 1.
- A character that the terminal's encoding lacks is replaced.
- Output that cannot be written is an error of one line. If the reader of a pipe has left, the status is 1 without a
  line.
- With `--json` or `-o json` the error is also on standard output, as `{"error": "…"}`, unless other output is there.
- Modules imported before the version check load on any Python 3.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
from typing import TextIO

USAGE = 2  # exit status of an invalid command line
INTERRUPTED = 130  # exit status in shells of a command ended by Ctrl-C
JSON = {"--json", "--json=true", "-ojson", "--output=json"}
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
        write_out()  # raises UserError if earlier output could not be written
    except UserError as error:
        text = " ".join(str(error).split())
        with contextlib.suppress(OSError):
            print(f"holdfast: {text}", file=sys.stderr, flush=True)
        if asks_for_json(sys.argv[1:]) and not has_written():
            with contextlib.suppress(OSError, UserError):
                write_out(json.dumps({"error": text}) + "\n")
        status = USAGE if isinstance(error, UsageError) else exit_status(error)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader of its output has left
        status = 1
    let_go(sys.stdout)
    let_go(sys.stderr)
    sys.exit(status)


def asks_for_json(words: list[str]) -> bool:
    """Return True if the arguments ask for JSON: `--json`, `-o json`, `--output=json` and the like."""
    from itertools import pairwise  # exists from Python 3.10

    pairs = set(pairwise(words))
    return bool(JSON & {*words} or {("-o", "json"), ("--output", "json")} & pairs)


def let_go(stream: TextIO) -> None:
    """Flush the stream. If it cannot be written, discard its buffer, because the interpreter's own flush at exit would
    fail."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_what_is_closed() -> None:
    """Open /dev/null in place of a closed standard file (`>&-`). A lock or socket would otherwise get its number and be
    lost in child processes, which replace these numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # open() returns the lowest free number: this one
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def plain(error: UnicodeError) -> tuple[str, int]:
    """Return replacements for characters that cannot be encoded (a codecs error handler)."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end


def soften_output() -> None:
    """Make standard output and error replace characters that their encoding lacks."""
    codecs.register_error(NAME, plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a stream of another program may lack it
            stream.reconfigure(errors=NAME)
