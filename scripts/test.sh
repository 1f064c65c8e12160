#!/usr/bin/env bash
# Lints and runs all tests.
set -euo pipefail
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    echo "usage: bash scripts/test.sh [pytest arguments, e.g. tests/test_sde.py]"
    echo "Lints and runs all tests, or those named, in .venv (or \$VENV), which is made if need be."
    exit
fi
EXTRAS=test source "$(dirname "$0")/venv.sh"

"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
chosen="not alone"
if ! command -v chromium chromium-browser google-chrome >/dev/null; then
    echo "no chromium here: tests of pages are left out (apt install chromium)"
    chosen="not alone and not browser"
fi
# Most tests wait for processes they start, so two at a time, the longest files (e2e) first; then
# those that measure speed, whose files are named, as to collect all tests takes half a minute.
# 5: the arguments leave no test of that kind
"$VENV/bin/python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "$chosen" "$@" || [ $? -eq 5 ]
[ $# -gt 0 ] || set -- $(grep -rl --include='*.py' pytest.mark.alone tests)
"$VENV/bin/python" -m pytest -q -m alone "$@" || [ $? -eq 5 ]
