#!/usr/bin/env bash
# Trains the small model that ships in the repo to draw signs that OCR can read, on CPU or GPU.
# Usage: bash scripts/quickstart.sh [PRESET] [--config.seed=1 ...]
# PRESET: tiny_awm if none is given; tiny_ocr for GRPO, others are in docs/algorithms.md
set -euo pipefail
EXTRAS=ocr,plot source "$(dirname "$0")/venv.sh"

preset=tiny_awm
if [[ "${1:-}" == [!-]* ]]; then
    preset="$1"
    shift
fi
run="quickstart-$(date +%Y%m%d-%H%M%S)"
"$VENV/bin/python" scripts/train.py --config "config/grpo.py:$preset" "$@" \
    --config.logdir=logs --config.run_name="$run"
"$VENV/bin/python" scripts/plot.py curve "logs/$run" --metric eval/ocr reward/ocr \
    --out "logs/$run/curve.png"
last="$(ls -d "logs/$run/samples/eval-"* | tail -n 1)"
"$VENV/bin/python" scripts/plot.py pictures "logs/$run/samples/eval-00000" "$last" \
    --count 24 --out "logs/$run/before_after.png"
echo "to go on: source $VENV/bin/activate, then see README.md"
echo "held-out words, before (left of each pair) and after: logs/$run/before_after.png"
echo "checkpoint for diffusers' load_lora_weights: $(ls -d "logs/$run/checkpoints/"*/ema_lora | sort -V | tail -n 1)"
