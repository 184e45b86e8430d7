"""What a person wrote after `--model`: what is loaded, what it is called, and fetching it with a bar to watch."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from msgspec import structs

from holdfast.cli.progress import works
from holdfast.core.errors import HoldfastError, UserError
from holdfast.engines.torch.files.hub import fetch_from_hub, is_hub_id
from holdfast.roles.examining import Asked, examine, examine_sim
from holdfast.spec.deployment import DeploymentSpec

SIM_NAME = "holdfast-sim"
DEFAULT = "default"
WORKS = {"fetch": "fetching", "check": "checking", "unpack": "unpacking"}
MODELS = (
    "give a directory with config.json and safetensors, a .gguf file, a Hub id (org/name), tiny (random weights), "
    "or nothing (SmolLM2)"
)
NAMES = {DEFAULT: "smollm2-135m-instruct", "smollm2-135m": "smollm2-135m-instruct", "tiny": "tiny"}


def named(engine: str, model: str, served_name: str) -> tuple[str, str]:
    """What is loaded (a path made absolute: engines stand elsewhere), and the name clients ask for."""
    if engine == "sim":
        return DEFAULT, served_name or model or SIM_NAME
    source = model or DEFAULT
    if _is_made(source):
        return source, served_name or NAMES.get(source) or source
    path = Path(source).expanduser().absolute()
    if not path.exists() and is_hub_id(source):
        return source, served_name or source.partition("@")[0]
    return str(path), served_name or path.name.removesuffix(".gguf")


def _is_made(source: str) -> bool:
    """Fetched, or made of a seed: there is no path."""
    return source in NAMES or source.startswith("random:")


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
        elif not _is_made(source) and not Path(source).exists():
            raise UserError(f"--model {source} is not there; {MODELS}")
        looked_at = examine(Asked.of_deployment(spec, free_bytes), progress)
    check_text(looked_at.tokenizer_json, "" if spec.worker.chat_template else looked_at.chat_template or "")
    return spec
