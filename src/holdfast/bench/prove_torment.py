"""`make prove-torment`: ten minutes of random faults under a real engine's deployment; written to a results file.

Exits with 1 if an answer was lost, wrong or hung, if there were two leaders, if redundancy did not come back, or if a
process was left behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.bench import torment
from holdfast.bench.results import Row, prove

RESULTS = Path("bench/results/torment.json")
FIGURES = (
    "faults", "answers", "cancelled", "lost_or_wrong", "hanging", "two_leaders",
    "longest_answer_s", "whole_again_s_p50", "whole_again_s_max", "full_disk",
)  # fmt: skip


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


ROWS: dict[str, Callable[[], Row]] = {
    "everything": lambda: torment.run(torment.Torment(), _tell),
}


def main(argv: list[str]) -> int:
    return prove("prove-torment", __doc__ or "", ROWS, RESULTS, FIGURES, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
