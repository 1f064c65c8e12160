#!/usr/bin/env bash
# Trains with FSDP2 on all GPUs of this machine, or on GPUS of them: weights, gradients and optimizer
# state are sharded.
# bash scripts/single_node/train_fsdp2.sh general_ocr_sd3 8 --config.use_lora=False
set -euo pipefail
usage='train_fsdp2.sh CONFIG [GPUS] [--config.key=value ...]'
source "$(dirname "${BASH_SOURCE[0]}")/start.sh"

read_config "$@"
start fsdp2 "${@:2}"
