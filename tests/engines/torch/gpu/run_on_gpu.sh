#!/usr/bin/env bash
# Everything of the torch engine that needs a GPU, on a bare GPU host: no network, no venv of ours.
#   run_on_gpu.sh tests speed    the gpu tests, then our decode throughput        under 8 minutes
#   run_on_gpu.sh hardening      preempted, broken and wishing streams; --exact   under 6 minutes
#   run_on_gpu.sh chain          kills under load                                 under 9 minutes
#   run_on_gpu.sh vllm           stock vLLM's decode throughput, for the ratio    under 9 minutes
#   run_on_gpu.sh vllm-speed     the same of vLLM as an engine of ours            under 9 minutes
#   run_on_gpu.sh vllm-chain     kills under load of that                         under 9 minutes
# The last two take a model's directory from $MODEL, which is made with random weights if it is not there.
# Packages that the host lacks are wheels in $WHEELS; vLLM, cut into pieces, lies in $VLLM (part0/vllm, …, deps0/, …).
# Writes into $OUT: engine-gpu.json (figures, after each part), a file per part, the log, and machine.txt. To put the
# files of several runs together: python -m bench.engine_gpu.measure --parts merge --out DIR
# MORE are other words for the bench, e.g. MORE="--kills 12 --standbys 3".
set -uo pipefail
cd "$(dirname "$0")/../../../.."
OUT="${OUT:-$(mktemp -d)}"
PYTHON="${PYTHON:-python3}"
WHEELS="${WHEELS:-.gpuwheels}"
VLLM="${VLLM:-.gpuvllm}"
DEVICE="${DEVICE:-cuda-0}"
MODEL="${MODEL:-/dev/shm/random-8b}"
read -ra MORE <<< "${MORE:-}"
[ $# -gt 0 ] || set -- tests speed
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ulimit -n 20000 2>/dev/null || ulimit -n "$(ulimit -Hn)"
ulimit -c 0  # facts 4c

install() { "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --no-index "$@"; }

have() { "$PYTHON" -c "import $1" 2>/dev/null; }

wheels() {
  have msgspec && have httptools && have uvloop && have pytest_asyncio && return 0
  local found=("$WHEELS"/*.whl)
  [ -e "${found[0]}" ] \
    || { echo "msgspec, httptools, uvloop or pytest-asyncio is missing, and $WHEELS has no wheels"; return 1; }
  install "${found[@]}"
}

# A wish that is refused before anything is started shows that the command loads here.
command_line() {
  local said
  said="$(HOLDFAST_STATE_DIR=/tmp/hf-smoke "$PYTHON" -m holdfast up --standbys 99 --kv-gib 1 2>&1)"
  [[ "$said" == *"--standbys must be"* ]] && return 0
  echo "$said"
  return 1
}

vllm_wheels() {
  have vllm && return 0
  [ -e "$VLLM/part0/vllm" ] || { echo "vLLM is not installed, and $VLLM has no pieces of it"; return 1; }
  local whole
  whole="$(mktemp -d)/vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl"
  cat "$VLLM"/part?/vllm > "$whole" && install "$whole" "$VLLM"/deps?/*.whl
}

# Without our conftest (it needs packages that are not there) and without plug-ins' settings.
tests() {
  timeout 180 "$PYTHON" -m pytest --noconftest -p no:cacheprovider -o addopts= -q -W ignore -rs --durations=8 \
    -m gpu tests/engines/torch/gpu
}

hardening() {
  local status=0
  timeout 120 "$PYTHON" -m pytest --noconftest -p no:cacheprovider -o addopts= -q -W ignore -rs --durations=8 \
    -m gpu tests/engines/torch/gpu/test_gpu_steps.py || status=1
  timeout 200 "$PYTHON" tests/engines/torch/gpu/measure_steps.py || status=1
  return $status
}

bench() {
  timeout "$1" "$PYTHON" -m bench.engine_gpu.measure --out "$OUT" --device "$DEVICE" --folder "$MODEL" --parts "$2" \
    "${MORE[@]}"
}

# No address is asked for anything; greedy decoding draws with no such sampler. What its compiler made is kept for the
# next engine, as on any machine where it ran before.
of_vllm() {
  vllm_wheels || return 1
  [ "$1" = vllm ] || [ -d "$MODEL" ] || "$PYTHON" -m bench.engine_gpu.random_model "$MODEL" || return 1
  VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 \
    VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-/tmp/vllm-cache}" bench 520 "$1"
}

status=0
{
  { wheels && command_line; } || status=1
  {
    uname -a
    "$PYTHON" -V
    "$PYTHON" -m pip list 2>/dev/null | grep -iE '^(cuda-|torch|triton|vllm|pytest|msgspec|uvloop|httptools|numpy|transformers|tokenizers|jinja2|prometheus)'
    nvidia-smi
    free -m
  } > "$OUT/machine.txt" 2>&1
  for part in "$@"; do
    echo "== $part, $(date +%T)"
    case "$part" in
      tests) tests || status=1 ;;
      hardening) hardening || status=1 ;;
      speed) bench 340 speed || status=1 ;;
      chain) bench 560 chain || status=1 ;;
      vllm | vllm-speed | vllm-chain) of_vllm "$part" || status=1 ;;
      *) echo "unknown part $part; there are: tests, hardening, speed, chain, vllm, vllm-speed, vllm-chain"; status=1 ;;
    esac
  done
  echo "== end, $(date +%T), status $status"
  exit $status
} 2>&1 | tee "$OUT/engine-gpu.log"
exit "${PIPESTATUS[0]}"
