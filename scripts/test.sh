#!/usr/bin/env bash
# Lints and runs all tests. Usage: bash scripts/test.sh [pytest arguments, e.g. -m "not slow"]
set -euo pipefail
EXTRAS=test source "$(dirname "$0")/venv.sh"

"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/python" -m pytest -q "$@"
