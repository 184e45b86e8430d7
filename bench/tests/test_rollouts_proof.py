"""A tenth of `make prove-rollouts`: changes under load that lose nothing, and how what clients saw is judged."""

from __future__ import annotations

import os
import random

import pytest

from bench.rollouts import campaign
from bench.rollouts.clients import Asked, Found, alike, judge
from bench.rollouts.hits import Victim
from bench.rollouts.looks import Look, Looks
from bench.rollouts.scenario import Change, missed_by
from bench.rollouts.shapes import FRONTEND, NAME, WORKER
from bench.rollouts.table import BAD, GOOD, SCENARIOS
from holdfast.spec.manifest.checking import check
from holdfast.testing.answers import Answer

SEED = int(os.environ.get("HOLDFAST_TEST_SEED", "1"))


@pytest.mark.processes
@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["good", "bad"])
def test_a_change_under_load_loses_nothing(kind: str) -> None:
    """One scenario by the seed, with a process killed at one of its steps, or the supervisor itself: every answer is
    one of a set's own, and no place was empty. A bad update is undone, and met no customer."""
    rng = random.Random(f"{SEED} {kind}")
    step = rng.randint(1, 8)
    if kind == "good" and rng.random() < 0.25:
        row = campaign.supervisor_dies(print, seed=SEED, places={step})
    else:
        sim = [scenario for scenario in GOOD if not scenario.name.startswith("torch")]
        row = campaign.run(rng.choice(sim if kind == "good" else BAD), print, seed=SEED, steps={step})
    assert row["met"], row


# -- how it is judged


def said(*tokens: int, exact: bool = True, wrong: str = "") -> Answer:
    error = {"message": wrong} if wrong else None
    return Answer("words", list(tokens), "length", done=not wrong, error=error, exact=exact)


def test_an_answer_is_one_of_a_sets_own_or_says_that_it_is_not_exact() -> None:
    """A stream that went on in another set is wrong if it does not say so; one that did not end is lost, or cut if its
    frontend was killed under it."""
    known = [[said(1, 2, 3)], [said(4, 5, 6)]]
    answers = [said(1, 2, 3), said(4, 5, 6), said(1, 5, 6), said(1, 5, 6, exact=False), said(1, wrong="gone")]
    asked = [Asked(0, float(number), number + 0.5, answer) for number, answer in enumerate(answers)]
    found = judge(asked, known, cuts=[])
    assert (found.answers, len(found.wrong), found.inexact, found.lost, found.cut) == (5, 1, 1, ["gone"], 0)
    assert judge(asked, known, cuts=[(4.2, 4.3)]).cut == 1


def test_arithmetic_by_batches_is_judged_by_length_and_end() -> None:
    """Other tokens are right there, fewer are wrong; one that went on elsewhere is not exact, and no other is."""
    right = said(1, 2, 3)
    resumed = Answer("words", [4, 5, 6], "length", done=True, resumed=1, exact=False)
    assert [alike(right, one) for one in (said(4, 5, 6), resumed)] == ["", ""]
    assert all(alike(right, one) for one in (said(1, 2), said(1, 2, 3, exact=False), said(1, wrong="gone")))


def test_how_long_clients_wait_is_told() -> None:
    """The longest pause in an answer, wait for one, and silence of all are reported."""
    times = [[1.0, 1.5, 4.0], [2.5, 4.5]]
    answers = [Answer("", [1], "length", done=True, token_times_s=one) for one in times]
    asked = [Asked(0, 0.5, 4.0, answers[0]), Asked(0, 0.6, 4.5, answers[1])]
    found = judge(asked, [[answers[0]]], cuts=[])
    assert (found.pause_s, found.wait_s, found.silence_s) == pytest.approx((2.5, 1.9, 1.5))


def test_a_frontend_without_workers_shows_that_nobody_serves() -> None:
    """It takes requests all the same, and holds them; beside one that is ready it has only just begun."""
    looks = Looks(None, (WORKER,))  # type: ignore[arg-type]
    worker = {"name": f"{NAME}-worker-0123abcd-1-engine-0", "active": True}
    ready, empty = {"status": "ready", "workers": [worker]}, {"status": "no_worker", "workers": []}
    assert looks._serving({"a": ready, "b": empty}) == {WORKER: 1, FRONTEND: 1}
    assert looks._serving({"b": empty}) == {WORKER: 0, FRONTEND: 1}
    assert looks._serving({"c": {"status": "draining", "workers": []}}) is None
    looks.looks = [Look(at_s, {WORKER: at_s in (0.0, 3.0)}, {}) for at_s in (0.0, 1.0, 2.0, 2.5, 3.0, 4.0)]
    assert looks.nobody_s(WORKER) == 2.0


def change(**more: object) -> Change:
    found = Found(10, [], [], 0, 0, 0)
    sizes = {WORKER: 2, FRONTEND: 1}
    surge = {WORKER: 1, FRONTEND: 0}
    plain = {"found": found, "took_s": 20.0, "steps": 8, "floor": sizes, "least": sizes, "surge": surge, "said": []}
    return Change(**{**plain, **more})  # type: ignore[arg-type]


def test_which_promises_are_missed() -> None:
    """Each by its own words; one that is killed is missing, and the others are not."""
    good, bad = SCENARIOS["worker-version"], SCENARIOS["crashes"]

    def missed(one: Change, scenario: object = good) -> list[str]:
        return missed_by(one, scenario, 60.0)  # type: ignore[arg-type]

    assert missed(change()) == []
    one_less = {WORKER: 1, FRONTEND: 1}
    assert missed(change(least=one_less)) == ["Worker: 1 of 2 served"]
    assert missed(change(least=one_less, victim=Victim.OLD, killed="w")) == []
    assert missed(change(surge={WORKER: 2, FRONTEND: 0})) == ["Worker: 2 more than wanted"]
    assert missed(change(twice=["w: [1, 2]"])) == ["started twice: w: [1, 2]"]
    assert missed(change(twice=["w: [1, 2]"], victim=Victim.OLD, killed="w")) == []
    assert missed(change(undone="it broke")) == ["undone: 'it broke'"]
    assert missed(change(), bad) == ["undone: ''", "undone for another reason: ''"]
    right = "Worker-3 crashed 3 times in a row: it exited with 1"
    assert missed(change(undone=right), bad) == []
    assert missed(change(undone=right, attempts=2), bad) == ["2 customers' requests on a bad set"]
    assert missed(change(undone=right, took_s=500.0), bad) == ["undone after 500 s"]


def test_every_scenario_is_a_change_of_a_right_manifest() -> None:
    """Both shapes of each are accepted without a problem, and differ."""
    for scenario in SCENARIOS.values():
        for shape in (scenario.before, scenario.after):
            assert check(shape.manifest().encode()).problems == ()
        assert scenario.before.manifest() != scenario.after.manifest()


def test_each_step_is_hit_once_and_everybody_is_a_victim() -> None:
    """The same seed gives the same ones, and no more than asked for."""
    scenario = SCENARIOS["worker-version"]
    hits = campaign.hits_of(scenario, 10, SEED, 40)
    assert [hit.step for hit in hits] == list(range(1, 11))
    assert {hit.victim for hit in hits} == set(Victim)
    assert campaign.hits_of(scenario, 10, SEED, 40) == hits
    assert len(campaign.hits_of(scenario, 10, SEED, 3)) == 3
