"""Runs `python -m bench.engine`."""

from __future__ import annotations

from typing import Annotated

from bench.command import main, show, tell
from bench.engine.figures import table
from bench.engine.speed import EngineBench, run
from holdfast.cli.arguments import CommandOptions, Json
from holdfast.cli.checks import check_engine
from holdfast.cli.terminal import write_out
from holdfast.core.errors import UserError
from holdfast.settings import Environment
from holdfast.spec.settings import about


class EngineOptions(CommandOptions, frozen=True):
    """Measure how fast the torch engine decodes on this CPU, with --fast and --exact, compared with transformers."""

    model: Annotated[str, about("Model: default, tiny, a directory of safetensors, or a .gguf file.")] = "default"
    streams: Annotated[str, about("Number of concurrent streams; several runs are separated by commas.")] = "1,8"
    tokens: Annotated[int, about("Output tokens per stream.")] = 128
    prompt_tokens: Annotated[int, about("Average prompt length in tokens.")] = 64
    compare: Annotated[str, about("transformers: also measure its `generate`, alternating with ours.")] = ""
    repeats: Annotated[int, about("Number of rounds; results are medians.")] = 5
    threads: Annotated[int, about("CPU threads of torch; 0: all cores but one, as in the engine.")] = 0
    json: Json = False

    def run(self, env: Environment) -> int:
        check_engine("torch")
        try:
            counts = tuple(int(count) for count in self.streams.split(","))
        except ValueError:
            raise UserError(f"--streams are whole numbers with commas between, like 1,8; got {self.streams}") from None
        shape = (self.model, counts, self.tokens, self.prompt_tokens, self.compare, self.repeats, self.threads)
        result = run(EngineBench(env.cache_dir, *shape), tell)
        if self.json:
            return show(result, True)
        write_out(table(result))
        return 0


if __name__ == "__main__":
    main(EngineOptions, "engine")
