"""The variables that vLLM reads as it is imported, as Holdfast needs them. Pure: `roles.engine_vllm`,
which starts the engine's process, sets them before the import.

Always true: an engine is in the process that asked for it, on the devices that it was given.
"""

from __future__ import annotations

from holdfast.spec.names import is_host

LEVELS = {"debug": "DEBUG", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}  # vLLM tells a lot


def needed(*devices: str) -> dict[str, str | None]:
    """Return the variables that the devices of an engine's ranks require, whatever a person has set; None: unset."""
    own: dict[str, str | None] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process
        "VLLM_CPU_KVCACHE_SPACE": None,  # it would win over --kv-gib
    }
    # Each rank has the GPU of its number among those that it sees.
    return own if is_host(devices[0]) else own | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def usual(device: str, cores: int, log_level: str, ranks: int = 1) -> dict[str, str]:
    """Return the variables to use where a person has set nothing else."""
    own = {
        "VLLM_LOGGING_LEVEL": LEVELS.get(log_level, "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the model's files are here by now
        "VLLM_HOST_IP": "127.0.0.1",  # an engine's ranks are on one machine
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if is_host(device):  # engines that bind their threads all bind them to the same cores; one core is the event loop's
        own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, (cores - 1) // ranks))}
    return own
