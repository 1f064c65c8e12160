#!/usr/bin/env bash
# DeepSpeed ZeRO on all GPUs of this machine, or that many: stage 1 shares out the optimizer's
# state, 2 (taken where none is named) the gradients too, 3 the weights too.
# bash scripts/single_node/train_deepspeed.sh general_ocr_sd3 2 8 --config.use_lora=False
set -euo pipefail
usage='train_deepspeed.sh CONFIG [STAGE [GPUS]] [--config.key=value ...]'
source "$(dirname "${BASH_SOURCE[0]}")/start.sh"

read_config "$@"
shift
stage=2 gpus=""
is_option "${1:-}" || { stage="$1" && shift; }
is_option "${1:-}" || { gpus="$1" && shift; }
[[ "$stage" =~ ^[123]$ ]] || fail "the stage is '$stage' but must be 1, 2 or 3"
start "deepspeed_zero$stage" "$gpus" "$@"
