"""`make prove-bit-flips`: what it says of its injections, also of too few."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.bit_flips.injections import Patient
from bench.prove_bit_flips import Campaign, add_options, told
from holdfast.testing.supervised import Supervised


def campaign(*rows: dict[str, Any], words: tuple[str, ...] = (), errors: tuple[str, ...] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    made = Campaign(parser.parse_args(words), list(rows), list(errors))
    return told(made, [Patient(Supervised(folder=Path("unused")))])


def row(seed: int, outcome: str, check: int = 0, changed: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "seed": seed, "outcome": outcome, "check": check, "answers_changed": changed, "doubt": "", "false_alarm": "",
    } | more  # fmt: skip


def test_shares_are_of_what_was_made() -> None:
    """Caught, ended, missed and silent are counted as what they are, and found of those that did harm."""
    rows = [row(1, "caught", 1, 3), row(2, "caught", 3), row(3, "missed", 0, 1), row(4, "silent")]
    said = campaign(row(5, "ended"), *rows, words=("--injections", "5"))
    assert (said["injections"], said["caught_share"], said["silent_share"]) == (5, 0.4, 0.2)
    assert (said["caught_by_check"], said["ended_by_engine"], said["missed"]) == ({"1": 1, "3": 1}, 1, 1)
    assert (said["found_of_harmful_share"], said["caught_without_changed_answer"], said["met"]) == (0.75, 1, True)
    assert [line.partition(":")[0] for line in said["by_injection"]] == [f"seed {seed}" for seed in range(1, 6)]


def test_too_few_are_told_and_meet_nothing() -> None:
    """An end before the first injection, or before enough of them, is said with what there is, and is not met."""
    nothing = campaign()
    assert (nothing["injections"], nothing["caught_share"], nothing["met"]) == (0, None, False)
    some = campaign(*(row(seed, "silent") for seed in range(1, 50)))
    assert (some["injections"], some["injections_meant"], some["met"]) == (49, 60, False)


def test_weights_that_stay_wrong_accusations_and_errors_meet_nothing() -> None:
    """Whatever makes later figures doubtful is counted, and the bound is missed."""
    silent = row(1, "silent")
    for spoilt in (row(2, "silent", doubt="damaged"), row(2, "silent", false_alarm="token 1")):
        assert campaign(silent, spoilt, words=("--injections", "2"))["met"] is False
    assert campaign(silent, words=("--injections", "1"), errors=("seed 2: TimeoutError",))["met"] is False
    assert campaign(silent, words=("--injections", "1"))["met"] is True
