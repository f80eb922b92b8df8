#!/usr/bin/env bash
# Serves a Qwen3-Omni checkpoint (a small demo one when none is given): ./scripts/serve.sh --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
setup serve
exec "$PYTHON" -m triton_omni.serve.main "$@"
