"""Known questions that an operator gives, with real processes: from the file into the workers' cards, asked and judged
by control; and what is wrong in them takes no worker away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.requests import Sampling
from holdfast.engines.sim import vocabulary
from holdfast.engines.sim.language import Sequence
from holdfast.frontend.text.tokenizer import TextTokenizer
from holdfast.health.expectations import BANDS, TOP, answer_of, is_fit
from holdfast.testing.deployment import Deployment
from holdfast.testing.rig import get_json
from holdfast.testing.waiting import in_thread, until
from tests.rigs.health.verdicts import WatchedDeployment, watched

pytestmark = [pytest.mark.processes, pytest.mark.alone]

HEALTH = {"canary_interval_s": 0.5, "canary_share": 1.0}
SIM = {"ttft_ms": 5, "tpot_ms": 2}
BOUND_S = 120.0


def sure_of(count: int) -> tuple[str, list[int]]:
    """A text that the simulator continues with a clear lead, and the tokens that follow."""
    words, text = vocabulary.load(), TextTokenizer(vocabulary.tokenizer_json())
    for number in range(100):
        prompt = f"The first {number} prime numbers are 2, 3, 5,"
        ids = text.encode_now(prompt, add_special_tokens=True)
        engine = Sequence(words, ids, len(ids), Sampling(count, 0, temperature=0.0, top_logprobs=TOP, ignore_eos=True))
        said = [(engine.advance(), engine.logprobs) for _ in range(count)]
        answer = answer_of([token for token, _ in said], [each for _, each in said if each is not None])
        if is_fit(answer, BANDS["exact"]):
            return prompt, list(answer.tokens)
    raise AssertionError("there is one")


def page(rig: WatchedDeployment) -> dict[str, Any]:
    return get_json(rig.deployment.record("control")["status"], "/health", BOUND_S)


async def test_a_cards_questions_are_asked_and_what_is_wrong_in_them_is_withdrawn(tmp_path: Path) -> None:
    """Three workers, and a file with a right question, one that expects another token and one whose range no answer is
    in: the last two are withdrawn and told, no worker falls, and one that answers wrongly later is quarantined."""
    prompt, tokens = sure_of(4)
    right = {"prompt": prompt, "expected_tokens": tokens, "logprob_range": [-1.5, -0.5]}
    file = tmp_path / "canaries.json"
    file.write_text(json.dumps([right, right | {"expected_tokens": [7]}, right | {"logprob_range": [-0.2, 0]}]))
    with Deployment(3, SIM, worker={"canary_prompts": str(file)}, control={"health": HEALTH}) as place:
        async with watched(place) as rig:
            await until(lambda: not rig.unsound(), "every worker to be found sound", BOUND_S)
            refuted = lambda: len(said := page(rig)["refuted"]) == 2 and said  # noqa: E731
            told = await until(lambda: in_thread(refuted), "two expectations to be withdrawn", BOUND_S)
            assert told[0].startswith("canary_prompts[1] of card "), told
            assert f"token {tokens[0]} at place 0, expected 7" in told[0]
            assert told[1].startswith("canary_prompts[2] of card "), told
            assert "expected -0.2 to 0" in told[1]
            assert "what question 1 expects (given with the card) is withdrawn" in place.log("control")
            assert not [one for one in rig.verdicts.history if one.record.standing.fall]
            bad, *good = place.worker_names
            await in_thread(lambda: place.chaos(bad, "wrong_tokens"))
            fallen = lambda: (one := rig.verdict(bad)) and one.record.standing.quarantined  # noqa: E731
            await until(fallen, "the wrong worker to be quarantined", BOUND_S)
            assert not [one for one in rig.verdicts.history if one.record.standing.fall and one.name in good]
            assert len(page(rig)["refuted"]) == 2
