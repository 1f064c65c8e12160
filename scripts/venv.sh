# Sourced by quickstart.sh and test.sh: creates or updates .venv (or $VENV) and installs the package
# with the extras in $EXTRAS, if any.
if [[ "${BASH_SOURCE[0]}" == "$0" && $# -gt 0 ]]; then
    usage="usage: [VENV=.venv] [PYTHON=python3] [EXTRAS=ocr,plot] bash scripts/venv.sh"
    if [[ "$1" == -h || "$1" == --help ]]; then
        echo "$usage"
        echo "Creates or updates an environment with this package and the given extras."
        exit
    fi
    echo "error: unknown argument '$1'; $usage" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"
PYTHON="${PYTHON:-python3}"
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: PYTHON=$PYTHON must be Python 3.11 or newer; set PYTHON to another interpreter" >&2
    exit 2
fi
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
echo "installing into $VENV (the first time takes a few minutes)"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${EXTRAS:+[$EXTRAS]}"
