#!/usr/bin/env bash
# The ablation, measured on this machine: ./scripts/sweep.sh --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
setup test
exec "$PYTHON" -m triton_omni.sweep.main "$@"
