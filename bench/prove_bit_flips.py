"""`make prove-bit-flips`: random bits, 1 to 8 at a time, flipped in the weights of one worker with a real model.

Each injection is a command to the worker's fault socket (`flip_bits`, by seed), and is undone after it, which the
engine's own sums must confirm. It is looked for as control looks: the known questions of the model, one a check, judged
by `health.expectations` against what the sound worker answered. Beside that ordinary prompts are asked, to see whether
anybody would have noticed. What ends otherwise than well is counted as what it was: an engine that found numbers which
are not finite ended by itself.

A bound is missed if a sound worker was ever accused, if weights were not restored, or if fewer injections were made
than meant. How many are caught is reported, and has no bound: a bit that moves no answer cannot be found by asking, and
harms no client. When the time is over, what is under way is left out, and the rest is told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import uvloop

from bench.bit_flips.injections import BACK_S, PANEL, PANEL_TOKENS, Patient
from bench.prove import Row, Rows, cores, tell
from holdfast.testing.supervised import Supervised

INJECTIONS, INJECTIONS_MIN = 60, 50
RUN_S = 780.0  # about ten minutes on two idle cores; a busy machine makes fewer injections, and says so
KV_GIB = 1.0  # enough for one stream at a time, and engines side by side share a GPU
OPTIONS = ("--engine", "torch", "--fast", "--allow-chaos", "--controls", "0")
FIGURES = (
    "injections", "caught_share", "caught_by_check", "ended_by_engine", "missed", "silent_share",
    "found_of_harmful_share", "false_alarms", "not_restored",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default", help="default, or a path: a .gguf, or a folder of safetensors")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the engines compute")
    parser.add_argument("--engines", type=int, default=1, help="deployments side by side, each with its share of cores")
    parser.add_argument("--injections", type=int, default=INJECTIONS, help="how many to make, by all of them together")
    parser.add_argument("--limit-s", type=float, default=RUN_S, help="seconds after which it ends, and tells what is")


def rows(chosen: argparse.Namespace) -> Rows:
    return {"flips" if chosen.device == "cpu" else "flips-gpu": partial(_flips, chosen)}


def deployment(chosen: argparse.Namespace) -> Supervised:
    threads = max(1, cores() // chosen.engines)
    device = "cuda-0" if chosen.device == "cuda" else "cpu"
    where = ("--device", device, "--torch-threads", str(threads), "--kv-gib", str(KV_GIB))
    return Supervised(*OPTIONS, "--model", chosen.model, *where, start_s=BACK_S)


@contextlib.contextmanager
def running(ups: list[Supervised]) -> Iterator[None]:
    """All of them, started and ended side by side; none is left behind where one does not start."""
    with ThreadPoolExecutor(len(ups)) as threads:
        begun = [threads.submit(up.__enter__) for up in ups]
        try:
            for each in begun:
                each.result()
            yield
        finally:
            started = [up for up, each in zip(ups, begun, strict=True) if each.exception() is None]
            list(threads.map(Supervised.close, started))


@dataclass(slots=True)
class Campaign:
    """Injections by seed, taken by whichever deployment is free."""

    chosen: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def run(self, patients: list[Patient], ends_s: float) -> None:
        seeds = iter(range(1, self.chosen.injections + 1))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ends_s - time.monotonic()):
                await asyncio.gather(*(self._keep_injecting(patient, seeds) for patient in patients))
        for patient in patients:
            patient.lose()

    async def _keep_injecting(self, patient: Patient, seeds: Iterator[int]) -> None:
        await patient.learn()
        for seed in seeds:
            try:
                self.rows.append(await patient.inject(seed))
            except Exception as error:  # this deployment is of no use any more; the others go on
                self.errors.append(f"seed {seed}: {type(error).__name__}: {error}")
                return
            tell(f"{len(self.rows)} of {self.chosen.injections}: {dict(Counter(r['outcome'] for r in self.rows))}")


def _flips(chosen: argparse.Namespace) -> Row:
    began_s = time.monotonic()
    ups = [deployment(chosen) for _ in range(chosen.engines)]
    patients, campaign = [Patient(up) for up in ups], Campaign(chosen)
    with running(ups):
        began_asking_s = time.monotonic()
        uvloop.run(campaign.run(patients, began_s + chosen.limit_s))
        asked_s = time.monotonic() - began_asking_s
    return told(campaign, patients) | {"started_s": round(began_asking_s - began_s, 1), "asked_s": round(asked_s, 1)}


def told(campaign: Campaign, patients: list[Patient]) -> Row:
    rows, chosen = campaign.rows, campaign.chosen
    counts = Counter(row["outcome"] for row in rows)
    caught = [row for row in rows if row["outcome"] == "caught"]
    checks = Counter(row["check"] for row in caught)
    alarms = sum(1 for row in rows if row["false_alarm"])
    torn = sum(1 for row in rows if row["doubt"])
    harmful = len(rows) - counts["silent"]
    wanted = min(INJECTIONS_MIN, chosen.injections)
    return {
        "model": patients[0].model,
        "device": chosen.device,
        "engines": chosen.engines,
        "injections": len(rows),
        "injections_meant": chosen.injections,
        "questions": len(patients[0].pinned),
        "panel": f"{len(PANEL)} prompts, {PANEL_TOKENS} tokens each, temperature 0",
        "outcomes": dict(counts),
        "caught_share": _share(counts["caught"], len(rows)),
        "caught_by_check": {str(check): checks[check] for check in sorted(checks)},
        "ended_by_engine": counts["ended"],
        "missed": counts["missed"],  # an ordinary answer changed, and no canary did
        "silent_share": _share(counts["silent"], len(rows)),
        "found_of_harmful_share": _share(counts["caught"] + counts["ended"], harmful),
        "caught_without_changed_answer": sum(1 for row in caught if not row["answers_changed"]),
        "unsteady_answers": sum(patient.unsteady for patient in patients),  # of sound weights, so by themselves
        "steady_asked": sum(patient.steadied for patient in patients),
        "false_alarms": alarms,
        "not_restored": torn,
        "loaded_anew": sum(1 for row in rows if "loaded_anew" in row),  # an ended engine's damage was still there
        "errors": campaign.errors,
        "by_injection": [_line(row) for row in sorted(rows, key=lambda row: int(row["seed"]))],
        "bound": f"at least {wanted} injections, all undone, a sound worker never accused",
        "met": len(rows) >= wanted and not (alarms or torn or campaign.errors),
    }


def _line(row: Row) -> str:
    """A line of the file for each; which bits they were follows from the seed."""
    found = f"at check {row['check']}: {row.get('why', '')}" if row.get("check") else row.get("why", "")
    changed = f"{row.get('answers_changed', '?')} of {len(PANEL)} answers changed"
    what = f"seed {row['seed']}: {row.get('bits', '?')} bits"
    parts = [what, row["outcome"], found, changed, row["doubt"], row["false_alarm"]]
    return ", ".join(part for part in parts if part)


def _share(count: int, of: int) -> float | None:
    return round(count / of, 3) if of else None
