#!/usr/bin/env bash
# Trains with DDP on all GPUs of this machine, or on GPUS of them: each has a full copy of the model.
# bash scripts/single_node/train_multi_gpu.sh general_ocr_sd3_8gpu 8 --config.run_name=ocr
set -euo pipefail
usage='train_multi_gpu.sh CONFIG [GPUS] [--config.key=value ...]'
source "$(dirname "${BASH_SOURCE[0]}")/start.sh"

read_config "$@"
start multi_gpu "${@:2}"
