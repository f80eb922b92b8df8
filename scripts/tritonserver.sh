#!/usr/bin/env bash
# Becomes tritonserver with what the models need around it; the options are tritonserver's own:
#   OMNI_CHECKPOINT=checkpoints/demo ./scripts/tritonserver.sh --http-port 8000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
setup serve
exec "$PYTHON" -m triton_omni.serve.bare_tritonserver "$@"
