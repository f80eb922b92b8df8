#!/usr/bin/env bash
# The container's program: scripts/serve.sh with what the environment says, and its logs on standard output.
#
#   OMNI_CHECKPOINT        directory of the checkpoint; without it the image's demo checkpoint
#   OMNI_PROFILE           --profile: a layout, or a file
#   OMNI_SET               --set: one STAGE.KEY=VALUE a line, or several with ; between them
#   OMNI_MODEL_NAME        --model-name
#   OMNI_PORT              --port (9000)
#   OMNI_DRAIN_S           --drain-s
#   OMNI_READY_TIMEOUT_S   --ready-timeout-s
#   OMNI_API_KEYS          keys, separated by commas
#   OMNI_API_KEYS_FILE     a file of keys, one a line: the frontend's --api-keys-file
#
# One that is empty counts as absent. Arguments are serve.sh's; what follows -- goes to the frontend.
set -euo pipefail
known=(CHECKPOINT PROFILE SET MODEL_NAME PORT DRAIN_S READY_TIMEOUT_S API_KEYS API_KEYS_FILE PYTHON LOG_DIRECTORY)
logs="${OMNI_LOG_DIRECTORY:-/var/log/omni}"

for name in "${!OMNI_@}"; do
  if [[ " ${known[*]/#/OMNI_} " != *" $name "* ]]; then
    printf 'error: %s: no such variable; known are %s\n' "$name" "${known[*]/#/OMNI_}" >&2
    exit 2
  fi
  [[ -n "${!name}" ]] || unset "$name"
done

options=(--host 0.0.0.0 --log-directory "$logs") frontend=()
for option in checkpoint profile model-name port drain-s ready-timeout-s; do
  name="${option//-/_}" && name="OMNI_${name^^}"
  [[ -z "${!name:-}" ]] || options+=("--$option" "${!name}")
done
while IFS= read -r change; do
  [[ -z "${change//[[:space:]]/}" ]] || options+=(--set "$change")
done < <(tr ';' '\n' <<<"${OMNI_SET:-}")
[[ -z "${OMNI_API_KEYS_FILE:-}" ]] || frontend+=(--api-keys-file "$OMNI_API_KEYS_FILE")

while (($#)) && [[ "$1" != -- ]]; do options+=("$1") && shift; done
(($#)) && shift
frontend+=("$@")

# Both are written anew at every start, tritonserver's also when it is started once more.
tail -q -n +1 --pid=$$ -F "$logs"/{tritonserver,frontend}-"${OMNI_PORT:-9000}".log 2>/dev/null &
exec "$(dirname "${BASH_SOURCE[0]}")/../../scripts/serve.sh" "${options[@]}" -- "${frontend[@]}"
