#!/usr/bin/env bash
# A script of Flow-GRPO by its name there: starts one node of the same training with main.sh.
set -euo pipefail
name="$(basename "${BASH_SOURCE[0]}")"
nodes=4
case "$name" in
main[1-9].sh) preset=geneval_sd3 rank="${name//[!0-9]/}" ;;
flux.sh) preset=pickscore_flux ;;
flux_kontext.sh) preset=counting_flux_kontext ;;
qwenimage.sh) preset=pickscore_qwen_image ;;
qwenimage_edit.sh) preset=counting_qwen_image_edit ;;
sd3_grpo_guard.sh) preset=general_ocr_sd3_guard nodes=2 ;;
*) preset=geneval_sd3 ;;
esac
[[ -n "${rank:-}" ]] && arguments="" || arguments=" RANK"
usage="bash scripts/multi_node/$name$arguments [--config.key=value ...]"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    echo "usage: MASTER_ADDR=HOST $usage"
    echo "Starts one of ${NNODES:-$nodes} nodes (NNODES) with the preset $preset."
    exit
fi
if [[ -z "${rank:-}" ]]; then
    [[ "${1:-}" =~ ^[0-9]+$ ]] || {
        echo "error: the rank of this node is missing; usage: MASTER_ADDR=HOST $usage" >&2
        exit 2
    }
    rank="$1"
    shift
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/main.sh" --nodes "${NNODES:-$nodes}" \
    --node-rank "$rank" -- --config "config/grpo.py:$preset" "$@"
