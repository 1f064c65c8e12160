#!/usr/bin/env bash
# Lints and runs all tests.
set -euo pipefail
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    echo "usage: bash scripts/test.sh [pytest arguments, e.g. tests/test_sde.py]"
    echo "Lints and runs all or the given tests in .venv (or \$VENV), which is created if missing."
    exit
fi
EXTRAS=test source "$(dirname "$0")/venv.sh"

"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
chosen=""
if ! command -v chromium chromium-browser google-chrome >/dev/null; then
    echo "chromium is not installed: browser tests are skipped (apt install chromium)"
    chosen="not browser"
fi
# Tests start hundreds of processes, which would otherwise compile all modules again.
unset PYTHONDONTWRITEBYTECODE
# Most tests wait for processes that they start, so two run in parallel, the longest files (e2e) first.
"$VENV/bin/python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "$chosen" "$@"
