"""Stories of streams in one engine: `> command` lines are what happens, the rest is what came of it.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the outcomes anew, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.requests import GenerateRequest, Output
from holdfast.engines.paged.sequences import PENDING, Segment
from tests.rigs.engines.paged_scheduler import SIZE, World, request
from tests.rigs.transcripts import must_go_as_written, stories


class Story:
    """Plays commands against a scheduler over a real pool; streams are named by number."""

    def __init__(self) -> None:
        self.world = World()
        self.said: dict[int, list[int]] = {}
        self.asked: dict[int, GenerateRequest] = {}
        self.lines: list[str] = []

    def play(self, command: str) -> list[str]:
        self.lines = []
        words = [word for word in command.split() if "=" not in word]
        values = {key: int(value) for key, _, value in (word.partition("=") for word in command.split() if "=" in word)}
        getattr(self, f"do_{words[0]}")(words[1:], values)
        return [f"    {line}" for line in self.lines]

    def do_world(self, words: list[str], values: dict[str, int]) -> None:
        """Settings; first in a story."""
        self.world = World(values.pop("blocks", 8), **values)

    def do_ask(self, words: list[str], values: dict[str, int]) -> None:
        """A prompt of `length=` tokens that begins as others of its `text=`; an answer up to `max=` or `stop=`."""
        text = values.get("text", 0)
        tokens = [(text + at * at // 7) % 40 for at in range(values["length"])]
        stops = [values["stop"]] if "stop" in values else []
        self.send(int(words[0]), request(tokens, values.get("max", 4), ignore_eos=True, stops=stops))

    def do_resume(self, words: list[str], values: dict[str, int]) -> None:
        """The same request with all that was said."""
        number = int(words[0])
        asked = self.asked[number]
        tokens = asked.tokens + self.said[number]
        self.send(number, GenerateRequest("r", tokens, asked.prompt_len, asked.sampling))

    def send(self, number: int, asked: GenerateRequest) -> None:
        try:
            self.world.scheduler.submit(number, asked)
        except HoldfastError as refused:
            self.lines.append(f"{refused.code}: {refused.message}")
            return
        self.asked[number], self.said[number] = asked, []
        self.tell(self.world.scheduler.take_early())

    def do_cancel(self, words: list[str], values: dict[str, int]) -> None:
        self.world.scheduler.cancel(int(words[0]))

    def do_plan(self, words: list[str], values: dict[str, int]) -> None:
        plan = self.world.plan()
        if plan is None:
            self.lines.append("nothing to plan")
            return
        self.lines.append(f"step {plan.number}: " + ", ".join(segment_words(segment) for segment in plan.segments))

    def do_retire(self, words: list[str], values: dict[str, int]) -> None:
        self.tell(self.world.retire())

    def do_step(self, words: list[str], values: dict[str, int]) -> None:
        """Plan and retire, `step 3` times."""
        for _ in range(int(words[0]) if words else 1):
            self.do_plan([], {})
            if self.world.queue:
                self.do_retire([], {})

    def tell(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.said[output.stream] += output.tokens
            words = " ".join(map(str, output.tokens)) or "nothing"
            end = f" and ends: {output.finish}" if output.finish else ""
            self.lines.append(f"  {output.stream} says {words}{end}")

    def do_die(self, words: list[str], values: dict[str, int]) -> None:
        self.world.die_and_adopt(fence=False)
        self.lines.append(f"adopted: {self.world.pool!r}")

    def do_fence(self, words: list[str], values: dict[str, int]) -> None:
        self.lines.append(f"{self.world.pool.gpu_fence_passed()} blocks come back")

    def do_status(self, words: list[str], values: dict[str, int]) -> None:
        scheduler, blocks = self.world.scheduler, self.world.blocks
        self.lines += [f"{scheduler!r}", f"{self.world.pool!r}"]
        self.lines += [f"runs: {stream!r}" for stream in scheduler.running.values()]
        self.lines += [f"waits: {stream!r}" for stream in scheduler.waiting]
        resumes = blocks.resumes
        if resumes.resumed_total:
            self.lines.append(f"resumed {resumes.resumed_total}, most recomputed {resumes.recomputed_tokens_max}")
        self.world.check_books()


def segment_words(segment: Segment) -> str:
    if segment.tokens == [PENDING]:
        return f"{segment.stream} at {segment.start} (not known yet)"
    if len(segment.tokens) == 1:
        return f"{segment.stream} at {segment.start}" + ("" if segment.wants_token else ", no draw")
    draws = " and draws" if segment.wants_token else ""
    return f"{segment.stream} from {segment.start} to {segment.position}{draws}"


@stories("paged", least=7)
def test_the_story_goes_as_written(path: Path) -> None:
    """Every command has exactly the outcome the transcript tells."""
    must_go_as_written(path, Story)
    assert SIZE == 4
