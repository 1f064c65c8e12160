# shellcheck shell=bash
# Sourced by the scripts beside it, which say how they are used.
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

# The config is a file as --config takes it, or the name of a preset of config/grpo.py; that of a
# model that answers is config/vlm.py:PRESET.
read_config() {
    (($#)) && [[ "$1" != -* ]] || fail "the config is missing"
    command -v "$python" >/dev/null || fail "no $python here, activate the environment"
    [[ "$1" == *.py* ]] && config="$1" || config="config/grpo.py:$1"
    script=scripts/train.py
    [[ "$config" != config/vlm.py* ]] || script=scripts/train_vlm.py
}

is_option() {
    [[ -z "${1:-}" || "$1" == -* ]]
}

# accelerate config, number of processes or "", arguments of the script
start() {
    local file="$1" processes="$2"
    shift 2
    processes="${processes:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}"
    [[ "$processes" =~ ^[1-9][0-9]{0,3}$ ]] ||
        fail "the number of GPUs is '$processes' but must be at least 1"
    # port 0: any that is free, so that two runs can share a machine
    exec "$python" scripts/multi_node/launch.py accelerate \
        --config_file "scripts/accelerate_configs/$file.yaml" \
        --num_processes "$processes" --main_process_port 0 "$script" --config "$config" "$@"
}
