# shellcheck shell=bash
# Sourced by the other scripts in this directory.
usage="${usage:?}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
python="${PYTHON:-python}"

fail() {
    echo "error: $1; usage: bash scripts/single_node/$usage" >&2
    exit 2
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    echo "usage: bash scripts/single_node/$usage"
    sed -n '/^# /s/^# //p' "scripts/single_node/${usage%% *}"
    exit
fi

# CONFIG is a value of --config or a preset of config/grpo.py; for a VLM it is config/vlm.py:PRESET.
read_config() {
    (($#)) && [[ "$1" != -* ]] || fail "CONFIG is missing"
    command -v "$python" >/dev/null || fail "$python not found, activate the environment"
    [[ "$1" == *.py* ]] && config="$1" || config="config/grpo.py:$1"
    script=scripts/train.py
    [[ "$config" != config/vlm.py* ]] || script=scripts/train_vlm.py
}

is_option() {
    [[ -z "${1:-}" || "$1" == -* ]]
}

# Arguments: accelerate config, number of processes (default: all GPUs), arguments of the script.
start() {
    local file="$1" processes
    shift
    if is_option "${1:-}"; then
        processes="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
    else
        processes="$1"
        shift
    fi
    [[ "$processes" =~ ^[1-9][0-9]{0,3}$ ]] ||
        fail "GPUS='$processes' must be an integer of at least 1"
    # port 0: any free port, so that two runs can share a machine
    exec "$python" scripts/multi_node/launch.py accelerate \
        --config_file "scripts/accelerate_configs/$file.yaml" \
        --num_processes "$processes" --main_process_port 0 "$script" --config "$config" "$@"
}
