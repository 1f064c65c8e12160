#!/usr/bin/env bash
# Trains with DeepSpeed ZeRO on all GPUs of this machine, or on GPUS of them. STAGE 1 shards the
# optimizer state, 2 (the default) also the gradients, 3 also the weights.
# bash scripts/single_node/train_deepspeed.sh general_ocr_sd3 2 8 --config.use_lora=False
set -euo pipefail
usage='train_deepspeed.sh CONFIG [STAGE [GPUS]] [--config.key=value ...]'
source "$(dirname "${BASH_SOURCE[0]}")/start.sh"

read_config "$@"
shift
stage=2
is_option "${1:-}" || { stage="$1" && shift; }
[[ "$stage" =~ ^[123]$ ]] || fail "STAGE='$stage' must be 1, 2 or 3"
start "deepspeed_zero$stage" "$@"
