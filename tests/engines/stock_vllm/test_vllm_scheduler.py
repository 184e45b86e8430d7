"""vLLM's own schedulers over blocks that outlive the engine, through aborts, preemption, resets and deaths."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

# Not "vllm": where it is not installed, that is the folder this lies in.
pytest.importorskip("vllm.version", reason="vLLM is not installed here; `make test-vllm` runs this")

from vllm_scheduler_rig import PRIVATE, SIZE, TOKENS_MAX, Engine, live, make_config, make_scheduler


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
    engine.rest()


def test_a_text_that_never_fits_is_refused_at_start(tmp_path: Path) -> None:
    """vLLM counts the private blocks of all slots as room, and would wait for ever."""
    with pytest.raises(ValueError, match="max_model_len"):
        make_scheduler(make_config(tmp_path, TOKENS_MAX // SIZE - 1, "fcfs"), ahead=False)
