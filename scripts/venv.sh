# Sourced by quickstart.sh and test.sh: makes .venv (or $VENV) and installs the package with the
# extras in $EXTRAS, if any. An environment that is there already is used, and brought up to date.
if [[ "${BASH_SOURCE[0]}" == "$0" && $# -gt 0 ]]; then
    usage="usage: [VENV=.venv] [PYTHON=python3] [EXTRAS=ocr,plot] bash scripts/venv.sh"
    if [[ "$1" == -h || "$1" == --help ]]; then
        echo "$usage"
        echo "Makes an environment, or brings it up to date, with this package and those extras."
        exit
    fi
    echo "error: unknown argument '$1'; $usage" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"
PYTHON="${PYTHON:-python3}"
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $PYTHON is not Python 3.11 or newer; set PYTHON to one that is" >&2
    exit 2
fi
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
echo "installing into $VENV (the first time takes a few minutes)"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${EXTRAS:+[$EXTRAS]}"
