#!/usr/bin/env bash
# All GPUs of this machine, or that many, each with a whole copy of the model (DDP).
# bash scripts/single_node/train_multi_gpu.sh general_ocr_sd3_8gpu 8 --config.run_name=ocr
set -euo pipefail
usage='train_multi_gpu.sh CONFIG [GPUS] [--config.key=value ...]'
source "$(dirname "${BASH_SOURCE[0]}")/start.sh"

read_config "$@"
shift
gpus=""
is_option "${1:-}" || { gpus="$1" && shift; }
start multi_gpu "$gpus" "$@"
