#!/usr/bin/env bash
# Everything of failover that needs a GPU, in one command on a bare GPU host: no network, no venv of ours.
# Under eight minutes. Writes $OUT/failover-gpu.json (figures, after each part), $OUT/failover-gpu.log (every kill)
# and $OUT/machine.txt. TESTS=0 leaves the tests out; arguments go to the bench.
set -uo pipefail
cd "$(dirname "$0")/../../.."
OUT="${OUT:-$(mktemp -d)}"
mkdir -p "$OUT"
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ulimit -n 20000 2>/dev/null || ulimit -n "$(ulimit -Hn)"
ulimit -c 0  # facts 4c

{
  uname -a
  "$PYTHON" -V
  "$PYTHON" -m pip list 2>/dev/null | grep -iE '^(cuda-|torch|pytest|msgspec|numpy)'
  nvidia-smi
  free -m
} > "$OUT/machine.txt" 2>&1

status=0
{
  if [ "${TESTS:-1}" = 1 ]; then
    echo "== tests, $(date +%T)"
    # Without our conftest (it needs packages that are not there) and without plug-ins' settings.
    timeout 120 "$PYTHON" -m pytest --noconftest -p no:cacheprovider -o addopts= -q -W ignore -rs --durations=8 \
      bench/tests/test_gpu_failover.py -k cuda || status=1
  fi
  echo "== bench, $(date +%T)"
  timeout 340 "$PYTHON" -m bench.failover_gpu.measure --out "$OUT/failover-gpu.json" "$@" || status=1
  echo "== end, $(date +%T), status $status"
  exit $status
} 2>&1 | tee "$OUT/failover-gpu.log"
exit "${PIPESTATUS[0]}"
