"""The `holdfast` command's first lines: refuse what cannot work, then hand over to `cli.app`.

Always true: a person's mistake ends in one line on stderr and status 1, or 78 where trying again cannot help, never in
a traceback. What is imported before
the version check must load on any Python 3.
"""

from __future__ import annotations

import sys


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - run from a source tree, pip has checked nothing
        found = ".".join(map(str, sys.version_info[:2]))
        sys.exit(f"holdfast: needs Python 3.11 or newer, this is {found}; make a venv with a newer one")
    from holdfast.cli.plain_text import soften_output

    soften_output()
    from holdfast.cli.app import app
    from holdfast.core.errors import UserError, exit_status

    try:
        app(prog_name="holdfast")
    except UserError as error:
        print(f"holdfast: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(exit_status(error))
