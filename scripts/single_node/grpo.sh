#!/usr/bin/env bash
# A script of Flow-GRPO by its name there: starts the same training with the scripts here.
set -euo pipefail
name="$(basename "${BASH_SOURCE[0]}")"
usage="$name [--config.key=value ...]"
source "$(dirname "${BASH_SOURCE[0]}")/start.sh"

case "$name" in
grpo_flux.sh) run=(train_deepspeed.sh pickscore_flux_8gpu 2 8) ;;
dpo.sh) run=(train_1gpu.sh config/dpo.py:geneval_sd3) ;;
sft.sh) run=(train_1gpu.sh config/sft.py:geneval_sd3) ;;
*) run=(train_1gpu.sh general_ocr_sd3_1gpu) ;;
esac
exec bash "scripts/single_node/${run[0]}" "${run[@]:1}" "$@"
