#!/usr/bin/env bash
# Trains on one GPU, or on the CPU if there is none: one process without a launcher.
# bash scripts/single_node/train_1gpu.sh general_ocr_sd3_1gpu --config.run_name=ocr
set -euo pipefail
usage='train_1gpu.sh CONFIG [--config.key=value ...]'
source "$(dirname "${BASH_SOURCE[0]}")/start.sh"

read_config "$@"
exec "$python" "$script" --config "$config" "${@:2}"
