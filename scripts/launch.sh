# Sourced by one_node_train.sh, multi_node_train.sh and elastic_train.sh: what they have in common.
#
# From the environment:
#   SCRIPT   training script (imagenet_ddp.py)
#   DATA     image folder (the script's own default: $IMAGENET_DIR, else /data)
#   ARCH     model (the script's own default)
#   NPROC    processes on this node (one per GPU; one without GPUs)

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# need_number NAME VALUE PATTERN WORDS: the argument NAME must match PATTERN; WORDS describe it.
need_number() {
    [[ $2 =~ ^$3$ ]] || fail "$1 is $2: it must be $4"
}

# need_master: MASTER_ADDR must say where the nodes meet, and SCRIPT must train on several nodes.
need_master() {
    [ -n "${MASTER_ADDR:-}" ] ||
        fail "MASTER_ADDR is not set: on every node, export MASTER_ADDR=<IP address of node 0>" \
            "(this node has $(hostname -I 2>/dev/null || echo '?'))"
    case ${SCRIPT:-} in
    imagenet_nd.py | imagenet_dp.py) fail "$SCRIPT trains on one node: use imagenet_ddp.py" ;;
    esac
}

# ask_network FUNCTION IP: what a function of utils/launch/network.py returns; empty if unknown.
ask_network() {
    "$PYTHON" - "$root" "$@" <<'CODE'
import sys

sys.path.insert(0, sys.argv[1])
from utils.launch import network

print(getattr(network, sys.argv[2])(sys.argv[3]) or "")
CODE
}

# choose_interface IP: tell gloo and NCCL which interface to use, unless the user has.
#
# gloo looks up this host's own name, which Debian resolves to 127.0.1.1 and some clusters not at
# all; NCCL takes the first interface that is up, which may be Docker's. The interface that leads to
# the master is right on every node. ("=" makes NCCL match the whole name, not a prefix.)
choose_interface() {
    local interface
    interface=$(ask_network interface_towards "$1")
    [ -n "$interface" ] || return 0
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$interface}
    echo "interface: gloo $GLOO_SOCKET_IFNAME, NCCL ${NCCL_SOCKET_IFNAME#=} ($interface leads to $1;" \
        "to choose another, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME)"
}

# log_to FILE: from here on, keep a copy of all output there.
log_to() {
    mkdir -p "$(dirname "$1")" || fail "cannot write the log $1"
    # -i: Ctrl-C reaches tee as well, which must stay until the training has ended.
    # -p: so it must when nobody reads the output any more.
    exec > >(exec tee -i -p -a "$1") 2> >(exec tee -i -p -a "$1" >&2)
}

# launch HOURS NAME BATCH_SIZE LAUNCHER_OPTION ... [-- TRAINING_OPTION ...]
#
# $rank is the number (or name) of this node if there are several; with the options $meet (an array)
# they have a roll call first; with the line $again, which starts this node, the job is elastic. The
# output is also written to node<rank>.log in the run directory.
meet=() again=
launch() {
    local hours=$1 name=$2 batch=$3
    shift 3
    local script=${SCRIPT:-imagenet_ddp.py} launcher=()
    need_number TRAIN_HOURS "$hours" '([0-9]+\.?[0-9]*|\.[0-9]+)' "a number such as 1.5"
    need_number BATCH_SIZE "$batch" '([1-9][0-9]*|auto)' "a whole number, at least 1, or auto"
    [ -f "$root/$script" ] || fail "SCRIPT=$script does not exist in $root"
    use_environment
    local processes=${NPROC:-}
    if [ -z "$processes" ]; then
        processes=$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')
    fi
    need_number NPROC "$processes" '[1-9][0-9]*' "a whole number, at least 1"
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
    # Typed again, after whatever stopped it, the same line resumes from the last snapshot.
    command+=("$root/$script" -b "$batch" --train-time "$hours" --name "$name" --resume auto)
    [ -z "${ARCH:-}" ] || command+=(-a "$ARCH")
    command+=("$@")
    [ -z "${DATA:-}" ] || command+=("$DATA")

    local runs=runs number
    for ((number = 1; number <= $#; number++)); do # of several, the last one counts
        case ${!number} in
        --output-dir=*) runs=${!number#*=} ;;
        --output-dir) [ $number -eq $# ] || runs=${@:number+1:1} ;;
        esac
    done
    log_to "$runs/$name/node${rank:-0}.log"
    [ -z "${rank:-}" ] || choose_interface "$MASTER_ADDR"
    # torchrun would set this to 1, and warn; on the CPU all cores are wanted, shared out evenly.
    if [ -z "${OMP_NUM_THREADS:-}" ]; then
        local cores
        cores=$(nproc)
        export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
    fi
    printf '+ OMP_NUM_THREADS=%s%s\n' "$OMP_NUM_THREADS" "$(printf ' %q' "${command[@]}")"
    export IMAGENET_SUITE=launcher # the mark by which scripts/cleanup.sh knows its own
    local master=(--master "${MASTER_ADDR:-}" --port "${MASTER_PORT:-8888}")
    if [ -n "$again" ]; then
        # torchrun would wait for a meeting point that is gone for many minutes.
        local folder=$PWD
        cd "$root" && exec "$PYTHON" -m utils.launch.meeting_point "${master[@]}" \
            --folder "$folder" --again "$again" -- "${command[@]}"
    fi
    if [ ${#meet[@]} -gt 0 ]; then
        # torchrun itself would be silent for many minutes about a node that is missing.
        (cd "$root" && exec "$PYTHON" -m utils.launch.rollcall "${meet[@]}" "${master[@]}" \
            --processes "$processes") || exit
    fi
    exec "${command[@]}"
}
