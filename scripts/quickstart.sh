#!/usr/bin/env bash
# Trains the small model of the repository on CPU or GPU, by default to generate signs that OCR reads.
set -euo pipefail

usage='usage: bash scripts/quickstart.sh [PRESET] [--config.FIELD=VALUE ...]'
case " $* " in
*" -h "* | *" --help "*)
    cat <<EOF
$usage

Trains the small model of the repository to generate signs that OCR can read, on CPU or GPU. On the
first call it creates the environment .venv (or \$VENV) with python3 (or \$PYTHON).

  PRESET                 default: tiny_awm. tiny_ocr: GRPO; other methods: docs/methods/README.md.
                         tiny_geneval: scenes of shapes. edit: image editing, docs/editing.md.
                         vlm: questions about images, docs/vlm/README.md.
  --config.FIELD=VALUE   overrides a config field, e.g. --config.seed=1: docs/configuration.md

Curves, images and checkpoints are saved in logs/quickstart-DATE-TIME; open report.html there.
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
    --config.logdir=* | --config.run_name=*) fail "$argument cannot be set in the quickstart" ;;
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
echo "report: logs/$run/report.html (curves, samples of each epoch, health checks)"
if [[ "$preset" == vlm ]]; then
    echo "next: source $VENV/bin/activate, then see docs/vlm/README.md"
    echo "for transformers' from_pretrained: logs/$run/checkpoints/latest/model"
    exit
fi
last="$(ls -d "logs/$run/samples/eval-"* | tail -n 1)"
"$VENV/bin/python" scripts/plot.py pictures "logs/$run/samples/eval-00000" "$last" \
    --count 24 --out "logs/$run/before_after.png"
echo "next: source $VENV/bin/activate, then see docs/first_hour.md"
echo "held-out prompts, before (left of each pair) and after: logs/$run/before_after.png"
echo "checkpoint for diffusers' load_lora_weights: $(ls -d "logs/$run/checkpoints/"*/ema_lora | sort -V | tail -n 1)"
