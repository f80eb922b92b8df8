#!/usr/bin/env bash
# Triton's perf_analyzer on a running server, omni_bls and each stage: ./scripts/perf_analyzer.sh --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
source scripts/perf_analyzer/install.sh
setup serve
setup_perf_analyzer
exec "$PYTHON" scripts/perf_analyzer/run.py --tool "${PERF_ANALYZER[*]}" "$@"
