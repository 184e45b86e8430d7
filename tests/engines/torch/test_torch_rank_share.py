"""What a rank's process is started from: plain data, from which the same work comes out."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import holdfast
from holdfast.engines.torch.files.checkpoint import Checkpoint, FileCheckpoint
from holdfast.engines.torch.files.config import RopeScaling
from holdfast.engines.torch.files.resolve import tiny
from holdfast.engines.torch.files.stored import Stored
from holdfast.engines.torch.ranks.share import RankWork, decode_work, encode_work
from holdfast.kv.geometry import Geometry
from holdfast.spec.engines import FailoverSettings, TorchSettings


def work_of(checkpoint: Checkpoint) -> RankWork:
    geometry = Geometry(checkpoint.identity, "bfloat16", 16, 2, 1, 32, 64, rank=1, rank_count=2)
    failover = FailoverSettings("/tmp/gms/gms_host-2.sock", "host-2", engine_name="worker-1a", vault_uids=(7,))
    return RankWork(checkpoint, TorchSettings(ranks=2, kv_gib=0.25), failover, geometry, 512)


def files() -> FileCheckpoint:
    rope = RopeScaling("llama3", 8.0, original_context=8192)
    config = replace(tiny().config, rope_scaling=rope, eos_token_ids=(1, 2))
    tensors = {"lm_head.weight": Stored("BF16", (4, 8), Path("/models/a b.safetensors"), 80)}
    return FileCheckpoint(config, "sha256:1", b"words", "template", "a model", tensors, "<s>", {"temperature": 0.6})


@pytest.mark.parametrize("checkpoint", [files(), tiny()], ids=["files", "random"])
def test_a_ranks_work_is_the_same_on_the_other_side(checkpoint: Checkpoint) -> None:
    """But for the model's words, which only the leader speaks."""
    work = work_of(checkpoint)
    without_words = replace(work, checkpoint=replace(checkpoint, tokenizer_json=b"", chat_template=None))
    assert decode_work(encode_work(work)) == without_words


def test_work_over_other_weights_is_refused() -> None:
    """A rank that would load something else than its leader does not begin."""
    changed = encode_work(work_of(tiny())).replace(b'"seed":', b'"seed":1')
    with pytest.raises(ValueError, match="not the leader's weights"):
        decode_work(changed)


# vLLM's own objects, which vLLM too sends to its ranks so: over a socket pair that one process shares with its child.
PICKLED = {"engines/vllm/ranks/leader.py", "engines/vllm/ranks/rank.py"}


def test_nothing_else_is_unpickled_anywhere() -> None:
    """Data between processes can be read and do nothing else."""
    unwanted, root, used = {"pickle", "marshal", "shelve"}, Path(holdfast.__file__).parent, set[str]()
    for path in root.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if any(word in text for word in unwanted) else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if unwanted & set(names):
                used.add(str(path.relative_to(root)))
    assert used == PICKLED
