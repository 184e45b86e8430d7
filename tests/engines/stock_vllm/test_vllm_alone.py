"""A request that has vLLM's steps for itself, in turn with the others': what the second proof of a leader is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed here; `make test-vllm` runs this")

from vllm_scheduler_rig import SIZE, TOKENS_MAX, Engine, make_config


@pytest.mark.parametrize(("depth", "ahead"), [(1, False), (2, True)])
def test_one_request_has_its_steps_alone_and_the_others_go_on(tmp_path: Path, depth: int, ahead: bool) -> None:
    """It is in no step with another, both make progress by turns, all come to their ends with the tokens they would
    have anyway (the rig checks each), and afterwards steps are everybody's again."""
    engine = Engine(make_config(tmp_path, 4 * TOKENS_MAX // SIZE, "priority"), depth=depth, ahead=ahead)
    for first in range(3):
        engine.submit([first, 1, 0, 1, 0], 12)
    for _ in range(4):
        engine.step()
    engine.submit([1, 1, 1, 1, 1, 1], 5, priority=-1)
    alone = f"r{engine.count}"
    engine.scheduler.alone = alone
    engine.submit([2, 2, 1], 6)  # that came later and waits
    steps: list[set[str]] = []
    engine.scheduler.on_planned = lambda output: steps.append(set(output.num_scheduled_tokens))
    while engine.requests:
        engine.step()
    mixed = [each for each in steps if alone in each and len(each) > 1]
    assert not mixed
    own = [place for place, each in enumerate(steps) if each == {alone}]
    others = [place for place, each in enumerate(steps) if each and alone not in each]
    assert len(own) >= 2
    assert any(own[0] < place < own[-1] for place in others), "the others stood still"
    assert any(f"r{engine.count}" in each for each in steps), "who came later never ran"
    engine.rest()
