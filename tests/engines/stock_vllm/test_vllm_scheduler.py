"""vLLM's own schedulers over blocks that outlive the engine, through aborts, preemption, resets and deaths."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

# Not "vllm": where it is not installed, that is the folder this lies in.
pytest.importorskip("vllm.version", reason="vLLM is not installed here; `make test-vllm` runs this")

from tests.rigs.engines.vllm_schedulers import PRIVATE, SIZE, TOKENS_MAX, Engine, live, make_config, make_scheduler


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("depth", "ahead"), [(1, False), (1, True), (2, False), (2, True)])
def test_the_index_says_what_is_in_the_blocks(tmp_path: Path, depth: int, ahead: bool, policy: str) -> None:
    """At every moment of 500 steps and more: nothing early, nothing late, nothing lost, and every death leaves the next
    engine exactly what was published. Few blocks, so that streams are preempted."""
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    engine = Engine(make_config(tmp_path, TOKENS_MAX // SIZE + 2, policy), depth=depth, ahead=ahead)
    live(engine, Random(seed), 500)
    assert min(engine.preemptions, engine.found, engine.published) > 0


def test_a_standby_makes_tokens_in_its_own_blocks(tmp_path: Path) -> None:
    """Before it has a pool, and the same scheduler goes on over the pool."""
    config = make_config(tmp_path, TOKENS_MAX // SIZE, "fcfs")
    engine = Engine(config, depth=1, ahead=False)
    engine.vault.detach()
    engine.stands_by = True
    prompt = [1, 0, 1, 0, 1]
    for _ in range(2):
        engine.submit(prompt, PRIVATE * SIZE - len(prompt))
        while engine.requests:
            engine.schedule()
            assert {block > engine.world.shared for block in engine.world.flights[0].blocks} <= {True}
            engine.retire()
    assert engine.found == 0
    engine.vault.attach(engine.world.pool)
    engine.stands_by = False
    for _ in range(2):
        engine.submit(prompt, 4)
        while engine.requests:
            engine.step()
    assert engine.found == SIZE
    engine.finish_all()


def test_a_text_that_never_fits_is_refused_at_start(tmp_path: Path) -> None:
    """vLLM counts the private blocks of all slots as room, and would wait for ever."""
    with pytest.raises(ValueError, match="max_model_len"):
        make_scheduler(make_config(tmp_path, TOKENS_MAX // SIZE - 1, "fcfs"), ahead=False)


# -- a request that has steps for itself: the second proof of a leader


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
    engine.finish_all()
