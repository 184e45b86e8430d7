"""The model of a deployment that is to start: fetched, with a bar to watch, and looked at."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from msgspec import structs

from holdfast.cli.progress import works
from holdfast.cli.screen import Screen
from holdfast.core.errors import HoldfastError, UserError
from holdfast.engines.torch.files.hub import fetch_from_hub, is_hub_id
from holdfast.roles.devices import sizes_of
from holdfast.roles.examining import Asked, examine, examine_sim, examine_vllm
from holdfast.roles.model_names import is_made
from holdfast.spec.deployment import DeploymentSpec, pairs_on, seats

WORKS = {"fetch": "fetching", "check": "checking", "unpack": "unpacking"}
MODELS = (
    "give a directory with config.json and safetensors, a .gguf file, a Hub id (org/name), tiny (random weights), "
    "or nothing (SmolLM2)"
)


def check_text(tokenizer_json: bytes, template: str) -> None:
    """What frontends will do with the model's words; UserError says what they cannot read."""
    from holdfast.frontend.text.template import Templates
    from holdfast.frontend.text.tokenizer import TextTokenizer

    try:
        TextTokenizer(tokenizer_json)
        if template:
            Templates(datetime.now).get(template)
    except ValueError as error:
        raise UserError(f"the model's {error}") from error
    except HoldfastError as error:
        raise UserError(f"the model's chat template cannot be used: {error.message}") from error


def prepare(spec: DeploymentSpec, free_bytes: int | None) -> DeploymentSpec:
    """Have the model here, and know that it can be served, before anything is started; UserError if it cannot. The
    deployment with where it is."""
    if spec.worker.engine == "sim":
        examine_sim(spec, free_bytes)
        return spec
    if spec.worker.engine == "vllm":
        return _prepare_vllm(spec, free_bytes)
    source = spec.worker.source
    what = source if is_hub_id(source) else "SmolLM2-135M-Instruct"
    with works() as tell:

        def progress(work: str, done: int, total: int | None) -> None:
            tell(f"{WORKS[work]} {what}", done, total)

        if is_hub_id(source):
            fetched = structs.replace(spec.worker, source=str(fetch_from_hub(source, progress)))
            spec = structs.replace(spec, worker=fetched)
        elif not is_made(source) and not Path(source).exists():
            raise UserError(f"--model {source} is not there; {MODELS}")
        looked_at = examine(Asked.of_deployment(spec, free_bytes), progress)
    check_text(looked_at.tokenizer_json, "" if spec.worker.chat_template else looked_at.chat_template or "")
    return spec


def _prepare_vllm(spec: DeploymentSpec, free_bytes: int | None) -> DeploymentSpec:
    """The same for vLLM, which serves more families than ours."""
    worker = structs.replace(spec.worker, standbys=spec.standbys)
    where = {"workers": spec.workers}
    if gpus := spec.gpus:
        worker = structs.replace(worker, place=structs.replace(worker.place, device=gpus[0]))
        # The first has as many workers as any.
        pairs = pairs_on(seats(gpus, spec.workers, spec.ranks))
        free_bytes, where = None, {"workers": pairs, "gpu_bytes": sizes_of(gpus)[0]}
    with works() as tell:
        looked_at, plan = examine_vllm(
            worker, lambda work, done, total: tell(f"{WORKS[work]} {worker.source}", done, total), free_bytes, **where
        )
    Screen().line(plan.text(), style="dim")
    check_text(looked_at.text.tokenizer_json, "" if worker.chat_template else looked_at.text.chat_template or "")
    return structs.replace(spec, worker=structs.replace(spec.worker, source=str(looked_at.path)))
