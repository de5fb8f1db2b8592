# Sourced by one_node_train.sh and multi_node_train.sh: what they have in common.
#
# From the environment:
#   SCRIPT   training script (imagenet_ddp.py)
#   DATA     image folder (the script's own default: $IMAGENET_DIR, else /data)
#   ARCH     model (the script's own default)
#   NPROC    processes of this node (one a GPU; one without GPUs)

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

fail() {
    echo "error: $*" >&2
    exit 2
}

# need_number NAME VALUE PATTERN: VALUE, an argument called NAME, must match the PATTERN.
need_number() {
    [[ $2 =~ ^$3$ ]] || fail "$1 is $2, which is not a number of the right kind"
}

# launch HOURS NAME BATCH_SIZE LAUNCHER_OPTION ... [-- TRAINING_OPTION ...]
launch() {
    local hours=$1 name=$2 batch=$3
    shift 3
    local script=${SCRIPT:-imagenet_ddp.py} launcher=()
    need_number TRAIN_HOURS "$hours" '([0-9]+\.?[0-9]*|\.[0-9]+)'
    need_number BATCH_SIZE "$batch" '[1-9][0-9]*'
    [ -f "$root/$script" ] || fail "SCRIPT=$script is no script of $root"
    use_environment
    local processes=${NPROC:-}
    if [ -z "$processes" ]; then
        processes=$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')
    fi
    need_number NPROC "$processes" '[1-9][0-9]*'
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        launcher+=("$1")
        shift
    done
    [ $# -eq 0 ] || shift

    local command=("$PYTHON")
    case $script in
    imagenet_nd.py | imagenet_dp.py) ;; # one process
    *) command+=(-m torch.distributed.run "${launcher[@]}" "--nproc_per_node=$processes") ;;
    esac
    # The same line again, after whatever has stopped it, goes on from the last snapshot.
    command+=("$root/$script" -b "$batch" --train-time "$hours" --name "$name" --resume auto)
    [ -z "${ARCH:-}" ] || command+=(-a "$ARCH")
    command+=("$@")
    [ -z "${DATA:-}" ] || command+=("$DATA")
    # torchrun would set this to 1, and warn; scripts on the CPU want all cores, shared out.
    if [ -z "${OMP_NUM_THREADS:-}" ]; then
        local cores
        cores=$(nproc)
        export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
    fi
    echo "+ ${command[*]}"
    exec "${command[@]}"
}
