"""Runs `python -m bench.health`."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from bench.command import main, show, tell
from bench.health.faults import BY_NAME, FAULTS
from bench.health.judging import table
from bench.health.run import HealthBench, run
from bench.health.soak import soak
from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.terminal import write_out
from holdfast.core.errors import UserError
from holdfast.settings import Environment
from holdfast.spec.settings import about

PART = (r"[1-9]\d{0,3}/[1-9]\d{0,3}", "which of how many, like 2/8")


class HealthOptions(CommandOptions, frozen=True):
    """Inject each fault into one of four workers under load: what was detected, how soon, and at what cost.

    Exits with 1 if a stream was lost, a fault was missed or a healthy worker was blamed. Canaries are sent more often
    than by default; all thresholds are the defaults.
    """

    only: Annotated[str, about("Run only these faults, separated by commas.")] = ""
    pairs: Annotated[bool, about("Inject every two faults at once; takes half an hour.")] = False
    soak: Annotated[
        str, about("Inject no faults; overload workers and CPU cores for this long, e.g. 10m, and expect no alarm.")
    ] = ""
    part: Annotated[str, about("Run only one of several equal parts, e.g. 2/8.", like=PART)] = "1/1"
    limit_s: Annotated[float, about("Start no further case after this time; 0: no limit.", "s", min=0)] = 0.0
    canary_interval_s: Annotated[float, about("Time between canary checks of each worker.", "s", over=0)] = 5.0
    seed: Annotated[int, about("Random seed for the requests and for which worker gets the fault.")] = 1
    json: Json = False

    def run(self, env: Environment) -> int:
        names = [name.strip() for name in self.only.split(",") if name.strip()]
        if unknown := [name for name in names if name not in BY_NAME]:
            raise UserError(f"--only {unknown[0]}: there is {', '.join(BY_NAME)}")
        faults = tuple(BY_NAME[name] for name in names) or FAULTS
        which, parts = map(int, self.part.split("/"))
        if not 1 <= which <= parts:
            raise UserError(f"--part {self.part}: the first of eight is 1/8, the last 8/8")
        some: dict[str, Any] = {"part": (which, parts), "limit_s": self.limit_s or math.inf}
        bench = HealthBench(faults, self.pairs, self.seed, canary_interval_s=self.canary_interval_s, **some)
        result = soak(bench, seconds("--soak", self.soak), tell) if self.soak else run(bench, tell)
        if self.json or self.soak:
            show(result, self.json)
        else:
            write_out(table(result))
        return 1 if result["missed"] else 0


def seconds(flag: str, text: str) -> float:
    """Return the seconds of a time such as `90`, `90s`, `10m` or `2h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or not float(found[1]):
        raise UserError(f"{flag} is a time such as 90s, 10m or 2h; got {text!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


if __name__ == "__main__":
    main(HealthOptions, "health")
