"""What engines of a manifest take of a GPU, before any is loaded: who finds memory beside whom."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import holdfast.engines.sim
from holdfast.engines.torch.memory_plan import usable_bytes
from holdfast.roles.engines import memory_needed
from holdfast.roles.model_names import named
from holdfast.roles.rolled import Site
from holdfast.rollout.machine import StartReplica
from holdfast.rollout.revision import revision_of
from holdfast.spec.engines import GIB, FailoverSettings, TorchSettings, VllmSettings
from holdfast.spec.launch import WorkerLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.types import Manifest
from holdfast.supervise.device_places import device_claims
from holdfast.supervise.replicas import StartContext, jobs_of, refused_of, sets_of, with_memory_beside

GPU, H200_BYTES = "GPU-0", 139 * GIB
TOKENIZER = Path(holdfast.engines.sim.__file__).parent / "data/tokenizer.json"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
TEXT = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    Worker:
      componentType: worker
      failover: {enabled: true}
      resources: {limits: {gpu: 1}}
      extraPodSpec: {mainContainer: {image: IMAGE, args: [--engine, torch, --model, "random:8b"MORE]}}
"""


def manifest_of(image: str, more: str) -> Manifest:
    manifest = check(TEXT.replace("IMAGE", image).replace("MORE", more).encode()).manifest
    assert manifest is not None
    return manifest


def launch_of(source: str, kv_gib: float, **more: int) -> WorkerLaunch:
    return replace(WorkerLaunch(engine="torch", source=source, torch=TorchSettings(kv_gib=kv_gib)), **more)


def ground_of() -> StartContext:
    site = Site(state_dir="/tmp/hf", manifest="", environ={}, gpus=(GPU,), gpu_bytes=(H200_BYTES,))
    machine = Machine(Path("/tmp/hf"), {"HOME": "/"})
    return StartContext(machine, site.gpus, named, has_bytes=site.has_bytes, needs=memory_needed)


@pytest.mark.parametrize(
    ("more", "roomy"),
    [(', --kv-gib, "40"', {"Worker-1"}), (', --kv-gib, "60"', set()), ("", set())],
    ids=["two fit", "one fits", "its pool takes what is left"],
)
def test_a_second_pair_stands_by_where_a_gpu_has_memory_for_both(more: str, roomy: set[str]) -> None:
    """Weights, pool and what each engine has of its own, of both pairs; without --kv-gib nobody knows, and none is."""
    old, new = manifest_of("v:1", more), manifest_of("v:2", more)
    context, sets = ground_of(), sets_of([(old, {}), (new, {})])
    start = StartReplica("Worker-1", "Worker", revision_of(old, 1).parts["Worker"].set_id)
    there = jobs_of(start, sets, context, ())
    assert with_memory_beside(revision_of(new, 2), sets, context, device_claims(there), {"Worker-1": [GPU]}) == roomy


def test_a_pool_that_no_gpu_could_hold_is_known_before_anybody_leaves() -> None:
    """With what the pair needs and what the GPU has; one that just fits is not refused."""
    for kv_gib, refused in (("118", False), ("120", True)):
        manifest = manifest_of("v:1", f', --kv-gib, "{kv_gib}"')
        wish = revision_of(manifest, 1)
        found = refused_of(wish, sets_of([(manifest, {})]), ground_of())
        assert bool(found) is refused, found


def test_what_a_pair_needs_counts_its_standbys() -> None:
    """Each engine has its own context and workspace; weights and pool are there once."""
    one, two, three = (memory_needed(launch_of("random:8b", 10.0, standbys=standbys)) for standbys in range(3))
    assert two - one == three - two > 0
    assert memory_needed(launch_of("random:8b", 11.0)) - one == GIB


def test_a_model_that_is_not_here_yet_is_known_when_it_is(tmp_path: Path) -> None:
    """Its config.json tells; what cannot be read or fetched is not known, and nothing is fetched to find out."""
    launch = launch_of(str(tmp_path), 10.0)
    assert memory_needed(launch) == memory_needed(launch_of("an-org/a-model", 10.0)) == 0
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert memory_needed(launch) == memory_needed(launch_of("random:8b", 10.0)) > 0


def test_what_vllms_pair_needs_is_estimated(tmp_path: Path) -> None:
    """From its directory; of one that is not here, or not whole, nobody knows."""
    plain = WorkerLaunch(engine="vllm", source=str(tmp_path), failover=FailoverSettings(device=GPU))
    assert memory_needed(plain) == memory_needed(replace(plain, source="an-org/a-model")) == 0
    shutil.copy(TOKENIZER, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))
    one, two = (
        memory_needed(replace(plain, vllm=VllmSettings(kv_gib=10.0), standbys=standbys)) for standbys in range(2)
    )
    assert two > one > 10 * GIB


def test_finding_out_loads_no_torch() -> None:
    """A supervisor asks twice a second, and has neither torch nor a CUDA context."""
    code = (
        "import sys; from holdfast.roles.engines import memory_needed; from holdfast.spec.launch import WorkerLaunch\n"
        "from holdfast.spec.engines import TorchSettings\n"
        "assert memory_needed(WorkerLaunch(engine='torch', source='random:8b', torch=TorchSettings(kv_gib=9.0)))\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'cuda')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_what_is_promised_of_a_gpu_is_less_than_it_has() -> None:
    """Drivers keep some for themselves; a GPU of which nothing is known has no size."""
    site = Site(state_dir="/tmp/hf", manifest="", environ={}, gpus=(GPU, "GPU-1"), gpu_bytes=(H200_BYTES, 0))
    assert site.has_bytes == {GPU: usable_bytes(H200_BYTES)}
    assert usable_bytes(H200_BYTES) < H200_BYTES
