#!/usr/bin/env bash
# Everything of the devices that needs a GPU, in one command on a bare GPU host: no network, no venv of ours.
# Takes a few minutes. Writes $OUT/memory_gpu.json (figures), $OUT/memory_gpu.log and $OUT/machine.txt.
# As root on a machine of its own it also tries huge pages for host slabs, and the compute modes we refuse.
set -uo pipefail
cd "$(dirname "$0")/../../.."
OUT="${OUT:-$(mktemp -d)}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export HOLDFAST_GPU_RESULTS="$OUT/memory_gpu.json" HOLDFAST_GPU_VAULT_RESULTS="$OUT/vault_gpu.json"
ulimit -n 20000 2>/dev/null || ulimit -n "$(ulimit -Hn)"

{
  uname -a
  "$PYTHON" -V
  "$PYTHON" -m pip list 2>/dev/null | grep -iE '^(cuda-|torch|pytest|hypothesis|numpy)'
  nvidia-smi
  ls -l /dev/nvidia*
  free -m
  cat /proc/self/cgroup
  cat /sys/kernel/mm/transparent_hugepage/shmem_enabled
} > "$OUT/machine.txt" 2>&1

# Without our conftest (it needs packages that are not there) and without plug-ins' settings.
test_it() { # label, arguments
  echo "== $1"
  shift
  timeout 280 "$PYTHON" -m pytest --noconftest -p no:cacheprovider -o addopts= -q -W ignore -rs "$@"
}

status=0
{
  test_it "cuda" tests/memory/gpu/test_gpu_devices.py --durations=8 || status=1
  test_it "vault" tests/memory/gpu/test_gpu_vault.py --durations=8 || status=1
  test_it "torch" tests/memory/gpu/test_gpu_torch_glue.py || status=1

  # Host slabs on each kind of page. Only a machine of our own may be changed, and it is changed back.
  pool=/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages
  shared=/sys/kernel/mm/transparent_hugepage/shmem_enabled
  if [ "${HOLDFAST_CHANGE_MACHINE:-0}" = 1 ] && [ -w "$pool" ] && [ -w "$shared" ]; then
    pool_before=$(cat "$pool")
    shared_before=$(sed 's/.*\[\(.*\)\].*/\1/' "$shared")
    echo 512 > "$pool"
    for mode in advise always; do
      echo "$mode" > "$shared"
      test_it "host, shared huge pages: $mode, pool: $(cat "$pool")" tests/memory/devices/test_device_contract.py \
        tests/memory/devices/test_device_host.py || status=1
    done
    echo "$shared_before" > "$shared"
    echo "$pool_before" > "$pool"
  else
    test_it "host" tests/memory/devices/test_device_contract.py tests/memory/devices/test_device_host.py || status=1
  fi
  exit $status
} 2>&1 | tee "$OUT/memory_gpu.log"
exit "${PIPESTATUS[0]}"
