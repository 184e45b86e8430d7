"""The model of a deployment that is to start: fetched, with a bar to watch, and looked at."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from msgspec import structs

from holdfast.cli.progress import works
from holdfast.core.errors import HoldfastError, UserError
from holdfast.engines.torch.files.hub import fetch_from_hub, is_hub_id
from holdfast.roles.examining import Asked, examine, examine_sim
from holdfast.roles.model_names import is_made
from holdfast.spec.deployment import DeploymentSpec

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
