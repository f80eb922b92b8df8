#!/usr/bin/env bash
# Sets up what the tests need and runs pytest with the given arguments: ./scripts/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
setup test
setup_stress_python
exec "$PYTHON" -m pytest "$@"
