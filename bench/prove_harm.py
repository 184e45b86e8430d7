"""`make prove-harm`: every check that can end, drain, rest or refuse is given a false alarm on the only worker (a), on
all workers at once (b), a true alarm on one of two (c), and on the only one (d), with eight long streams each.

A bound is missed if a stream is lost in a, b or c, if one of d is neither right, nor flagged, nor failed by name within
the hold, or if the service is away for longer than one load. `--cases ac` runs some of the four.
"""

from __future__ import annotations

import argparse
from functools import partial

from bench.harm.cells import CASES, CHECKS
from bench.harm.run import check
from bench.prove import Rows, tell

FIGURES = (*CASES, "missed")


def add_options(parser: argparse.ArgumentParser) -> None:
    told = ", ".join(f"{case}: {text}" for case, text in CASES.items())
    parser.add_argument("--cases", default="".join(CASES), metavar="LETTERS", help=f"only these ({told})")


def rows(chosen: argparse.Namespace) -> Rows:
    cases = [case for case in CASES if case in chosen.cases]
    return {name: partial(check, name, tell, cases) for name in CHECKS}
