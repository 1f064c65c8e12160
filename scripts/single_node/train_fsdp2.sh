#!/usr/bin/env bash
# FSDP2 on all GPUs of this machine, or that many: weights, gradients and optimizer are shared out.
# bash scripts/single_node/train_fsdp2.sh general_ocr_sd3 8 --config.use_lora=False
set -euo pipefail
usage='train_fsdp2.sh CONFIG [GPUS] [--config.key=value ...]'
source "$(dirname "${BASH_SOURCE[0]}")/start.sh"

read_config "$@"
shift
gpus=""
is_option "${1:-}" || { gpus="$1" && shift; }
start fsdp2 "$gpus" "$@"
