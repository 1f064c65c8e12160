#!/usr/bin/env bash
# Starts the processes of one node of a multi-node run; see usage below, or --help.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: bash scripts/multi_node/main.sh [options] -- [script] [arguments of the script]

Run it on every node with the same arguments, except for the node rank. The default script is
scripts/train.py; give another one, such as scripts/train_vlm.py, as the first word after --.

  --nodes N            number of nodes                       default: $NNODES or Slurm's
  --node-rank R        rank of this node, from 0             default: $NODE_RANK or Slurm's
  --master-addr HOST   name or address of node 0             default: $MASTER_ADDR or Slurm's
  --master-port PORT   a free port on node 0                 default: $MASTER_PORT or 29500
  --procs-per-node P   processes on this node                default: number of GPUs, or 1
  --join-timeout S     seconds to wait for the other nodes   default: 600
  --accelerate-config FILE
                       one of scripts/accelerate_configs, for DeepSpeed or FSDP; its numbers of
                       machines and processes are ignored. Without it: DDP.

Example, two nodes:
  bash scripts/multi_node/main.sh --nodes 2 --node-rank 0 --master-addr node-a -- \
      --config config/grpo.py:general_ocr_sd3 --config.run_name=ocr --config.resume=auto

Under Slurm no options are needed: see scripts/slurm/train.sbatch.
If nodes have several network interfaces, set NCCL_SOCKET_IFNAME (GPU) or GLOO_SOCKET_IFNAME (CPU)
to the one that reaches the other nodes. Set PYTHON to use another interpreter than `python`.

Exit codes: 0 finished; 2 invalid arguments; 3 rewards failed; 4 lost contact with another node;
75 stopped by a signal. After 4 and 75, restart all nodes with --config.resume=auto.
EOF
}

fail() {
    echo "error: $1" >&2
    exit 2
}

need_number() { # name, value, minimum, maximum
    if ! [[ "$2" =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3 || $2 > $4)); then
        fail "$1='$2' must be an integer from $3 to $4"
    fi
}

nodes="${NNODES:-${SLURM_NNODES:-}}"
node_rank="${NODE_RANK:-${SLURM_NODEID:-}}"
master_addr="${MASTER_ADDR:-}"
master_port="${MASTER_PORT:-}"
procs_per_node=""
join_timeout=600
accelerate_config=""

while (($#)) && [[ "$1" != -- ]]; do
    [[ "$1" != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
    case "$1" in
    -h | --help)
        usage
        exit 0
        ;;
    --nodes | --node-rank | --master-addr | --master-port | \
        --procs-per-node | --join-timeout | --accelerate-config)
        (($# > 1)) && [[ "$2" != -- ]] || fail "$1 needs a value"
        name="${1#--}"
        printf -v "${name//-/_}" %s "$2"
        shift 2
        ;;
    *) fail "unknown option '$1'; arguments of the script go after --" ;;
    esac
done
(($# > 1)) || fail "nothing to train; give the script or its arguments after --, or start \
Flow-GRPO's run with bash scripts/multi_node/sd3.sh 0"
shift
script=scripts/train.py
if [[ "$1" != -* ]]; then
    script="$(realpath -m -- "$1")"
    [[ -f "$script" ]] || fail "script $script does not exist; use scripts/train_vlm.py or omit it"
    shift
fi

if [[ -z "$master_addr" && -n "${SLURM_JOB_NODELIST:-}" ]]; then
    hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")" ||
        fail "scontrol cannot resolve SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST; give --master-addr"
    master_addr="${hosts%%$'\n'*}"
fi
if [[ -z "$master_port" && -n "${SLURM_JOB_ID:-}" ]]; then
    master_port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a node
fi
master_port="${master_port:-29500}"

[[ -n "$nodes" ]] || fail "the number of nodes is missing; give --nodes N or set NNODES"
[[ -n "$node_rank" ]] || fail "this node's rank is missing; give --node-rank R or set NODE_RANK"
[[ -n "$master_addr" ]] ||
    fail "the address of node 0 is missing; give --master-addr HOST or set MASTER_ADDR"
need_number --nodes "$nodes" 1 100000
need_number --node-rank "$node_rank" 0 $((nodes - 1))
need_number --master-port "$master_port" 1 65535
need_number --join-timeout "$join_timeout" 1 1000000

accelerate_config="${accelerate_config:+$(realpath -m -- "$accelerate_config")}"
[[ -z "$accelerate_config" || -f "$accelerate_config" ]] ||
    fail "--accelerate-config='$accelerate_config' does not exist"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-python}"
command -v "$python" >/dev/null || fail "$python not found; activate the environment or set PYTHON"
procs_per_node="${procs_per_node:-$("$python" -c \
    'import torch; print(torch.cuda.device_count() or 1)')}"
need_number --procs-per-node "$procs_per_node" 1 1024

echo "node rank $node_rank of $nodes, $procs_per_node processes, node 0: $master_addr:$master_port"
arguments=(--rdzv_conf "timeout=$join_timeout")
if [[ -n "$accelerate_config" ]]; then
    launcher=accelerate
    arguments+=(--config_file "$accelerate_config"
        --num_machines "$nodes" --machine_rank "$node_rank"
        --num_processes $((nodes * procs_per_node))
        --main_process_ip "$master_addr" --main_process_port "$master_port")
else
    launcher=torchrun
    arguments+=(--nnodes "$nodes" --node_rank "$node_rank" --nproc_per_node "$procs_per_node"
        --master_addr "$master_addr" --master_port "$master_port")
fi
# exec, so that a preemption signal reaches the processes
exec "$python" scripts/multi_node/launch.py "$launcher" "${arguments[@]}" "$script" "$@"
