#!/usr/bin/env bash
# A real fault of a real GPU, as NVML and the kernel's log tell it: in one command on a bare GPU host, under a minute,
# with no network and no venv of ours. Writes $OUT/faults_gpu.json (a line for each finding), .log and machine.txt.
set -uo pipefail
cd "$(dirname "$0")/../../.."
OUT="${OUT:-$(mktemp -d)}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export HOLDFAST_GPU_RESULTS="$OUT/faults_gpu.json"

{
  uname -a
  "$PYTHON" -V
  nvidia-smi
  ls -l /dev/nvidia* /dev/kmsg
  ls /proc/driver/nvidia/gpus
  dmesg 2>&1 | tail -5
} > "$OUT/machine.txt" 2>&1

# Without our conftest (it needs packages that are not there) and without plug-ins' settings.
timeout 55 "$PYTHON" -m pytest --noconftest -p no:cacheprovider -o addopts= -q -W ignore -rs -s --durations=5 \
  tests/health/gpu/test_gpu_faults.py 2>&1 | tee "$OUT/faults_gpu.log"
status="${PIPESTATUS[0]}"
dmesg 2>/dev/null | grep NVRM | tail -5 >> "$OUT/machine.txt"
exit "$status"
