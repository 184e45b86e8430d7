"""Run a benchmark as a command: options by the same table as `holdfast`'s, figures as lines or as JSON."""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.cli.app import HELP_WIDTH, NO_ENVIRONMENT, environment, page, panels_of
from holdfast.cli.arguments import CommandOptions, with_values
from holdfast.cli.main import INTERRUPTED, USAGE, asks_for_json, soften_output
from holdfast.cli.screen import works
from holdfast.cli.terminal import write_out
from holdfast.core.errors import UserError, exit_status
from holdfast.settings import read_environment
from holdfast.spec.arguments import HelpWanted, Options, UsageError, options_of, parse
from holdfast.spec.option_checks import check_given

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def main(kind: type[CommandOptions], name: str) -> None:
    """Run the benchmark that the options of `kind` describe, and exit with its status. A user error is one line."""
    soften_output()
    program = f"python -m bench.{name}"
    options = options_of(kind.of(read_environment(NO_ENVIRONMENT)), f"bench {name}")
    try:
        given = parse(sys.argv[1:], options, program)
        check_given(options, given)
        env = environment()
        status = with_values(kind.of(env), options, given).run(env)
    except HelpWanted:
        show_help(program, kind, options)
        status = 0
    except UserError as error:
        line = " ".join(str(error).split())
        print(f"{program}: {line}", file=sys.stderr)
        if asks_for_json(sys.argv[1:]):
            write_out(json.dumps({"error": line}) + "\n")
        status = USAGE if isinstance(error, UsageError) else exit_status(error)
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def show_help(program: str, kind: type[CommandOptions], options: Options) -> None:
    """Print the benchmark's usage, its docstring and its options."""
    width = shutil.get_terminal_size((HELP_WIDTH, 0)).columns
    lines = page(f"{program} [OPTIONS]", inspect.getdoc(kind) or "", panels_of(options, ""), "", width)
    write_out("".join(f"{line}\n" for line in lines))


def show(result: Mapping[str, Any], as_json: bool) -> int:
    """Print the figures, one a line or as one JSON object; return the exit status."""
    if as_json:
        write_out(json.dumps(result) + "\n")
        return 0
    width = max(map(len, result))
    for name, value in result.items():
        write_out(f"{name:<{width}}  {value}\n")
    return 0


def tell(text: str) -> None:
    """Print a line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def loading(text: str) -> Iterator[Progress]:
    """Yield a function that shows how many bytes are done as a bar, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with works() as show_work:
        yield lambda done, total: show_work(text, done, total)
