#!/usr/bin/env bash
# Trains a small model that ships in the repo, on CPU or GPU: to draw signs that OCR can read, or by
# another preset.
set -euo pipefail

usage='usage: bash scripts/quickstart.sh [PRESET] [--config.FIELD=VALUE ...]'
case " $* " in
*" -h "* | *" --help "*)
    cat <<EOF
$usage

Trains the small model that ships in the repo to draw signs that OCR can read, on CPU or GPU.
The first time it makes .venv (or \$VENV) with python3 (or \$PYTHON), and installs into it.

  PRESET                 tiny_awm if none is given; tiny_ocr for GRPO, others: docs/algorithms.md;
                         tiny_geneval draws scenes of shapes; edit trains a small model to edit
                         pictures as it is told: docs/models.md; vlm one to answer questions about
                         pictures: docs/vlm.md
  --config.FIELD=VALUE   another value of a field, e.g. --config.seed=1: docs/configuration.md

Curves, pictures and checkpoints go to logs/quickstart-DATE-TIME; report.html there shows them.
EOF
    exit
    ;;
esac

fail() {
    echo "error: $1; $usage" >&2
    exit 2
}

preset=tiny_awm
if [[ "${1:-}" == [!-]* ]]; then
    preset="$1"
    shift
fi
for argument in "$@"; do
    case "$argument" in
    --config.logdir=* | --config.run_name=*) fail "$argument: the quickstart names its own run" ;;
    --config.?*=* | --debug) ;;
    *) fail "unknown argument '$argument'" ;;
    esac
done
[[ "$preset" == edit ]] && preset=tiny_edit
run="quickstart-$(date +%Y%m%d-%H%M%S)"
script=train.py config="grpo.py:$preset" extras=ocr,plot
if [[ "$preset" == vlm ]]; then
    script=train_vlm.py config=vlm.py:tiny_vlm extras=vlm,plot
fi
EXTRAS="$extras" source "$(dirname "$0")/venv.sh"

"$VENV/bin/python" "scripts/$script" --config "config/$config" "$@" \
    --config.logdir=logs --config.run_name="$run"
"$VENV/bin/python" scripts/plot.py curve "logs/$run" --metric eval/avg reward/avg \
    --out "logs/$run/curve.png"
echo "open this first: logs/$run/report.html (curves, samples epoch by epoch, health)"
if [[ "$preset" == vlm ]]; then
    echo "to go on: source $VENV/bin/activate, then see docs/vlm.md"
    echo "for transformers' from_pretrained: logs/$run/checkpoints/latest/model"
    exit
fi
last="$(ls -d "logs/$run/samples/eval-"* | tail -n 1)"
"$VENV/bin/python" scripts/plot.py pictures "logs/$run/samples/eval-00000" "$last" \
    --count 24 --out "logs/$run/before_after.png"
echo "to go on: source $VENV/bin/activate, then see README.md"
echo "held-out prompts, before (left of each pair) and after: logs/$run/before_after.png"
echo "checkpoint for diffusers' load_lora_weights: $(ls -d "logs/$run/checkpoints/"*/ema_lora | sort -V | tail -n 1)"
