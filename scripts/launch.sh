# Sourced by one_node_train.sh, multi_node_train.sh and elastic_train.sh: what they have in common.
#
# From the environment:
#   SCRIPT   training script (imagenet_ddp.py)
#   DATA     image folder (the script's own default: $IMAGENET_DIR, else /data)
#   ARCH     model (the script's own default)
#   NPROC    processes on this node (one per GPU; one without GPUs)

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# need_number NAME VALUE PATTERN WORDS: the argument NAME must match PATTERN; WORDS describe it.
need_number() { [[ $2 =~ ^$3$ ]] || fail "$1 is $2: it must be $4"; }

# need_several_nodes SCRIPT: it must be able to train on several nodes.
need_several_nodes() {
    case $1 in
    imagenet_nd.py | imagenet_dp.py) fail "$1 trains on one node: use imagenet_ddp.py" ;;
    esac
}

# need_master: MASTER_ADDR must be the address of node 0, and SCRIPT train on several nodes.
need_master() {
    [ -n "${MASTER_ADDR:-}" ] ||
        fail "MASTER_ADDR is not set: on every node, export MASTER_ADDR=<IP address of node 0>" \
            "(this node has $(hostname -I 2>/dev/null || echo '?'))"
    need_several_nodes "${SCRIPT:-}"
}

# ask MODULE FUNCTION ARGUMENT: print what a function of utils/ returns, or exit with its error.
ask() {
    (cd "$root" && exec "$PYTHON" -c 'import importlib, sys
try: print(getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(sys.argv[3]))
except Exception as fault: sys.exit(f"error: {fault}")' "$@") || exit 2
}

# log_to FILE: from here on, keep a copy of all output there.
log_to() {
    mkdir -p "$(dirname "$1")" || fail "cannot write the log $1"
    # tee must survive Ctrl-C (-i) and the end of the reader (-p) until training has ended.
    exec > >(exec tee -i -p -a "$1") 2> >(exec tee -i -p -a "$1" >&2)
}

# launch HOURS NAME BATCH_SIZE [-- TRAINING OPTION ...]: become the training script.
#
# Its processes are started by torchrun with the options in `torchrun`, if there are any, else by
# the script itself, with those in `nodes`. The output is also written to `log` in the run directory.
torchrun=() nodes=() log=node0.log
launch() {
    local hours=$1 name=$2 batch=$3 script=${SCRIPT:-imagenet_ddp.py} runs=runs number processes
    shift 3
    [ $# -eq 0 ] || [ "$1" = -- ] || fail "$1: put options of the training script after --"
    [ $# -eq 0 ] || shift
    need_number TRAIN_HOURS "$hours" '([0-9]+\.?[0-9]*|\.[0-9]+)' "a number such as 1.5"
    need_number BATCH_SIZE "$batch" '[1-9][0-9]*' "a whole number, at least 1"
    need_number NPROC "${NPROC:-1}" '[1-9][0-9]*' "a whole number, at least 1"
    [ -f "$root/$script" ] || fail "SCRIPT=$script does not exist in $root"
    use_environment
    ask utils.option_types run_name "$name" >/dev/null

    local command=("$PYTHON")
    if [ ${#torchrun[@]} -gt 0 ]; then
        processes=$(gpus_of "$PYTHON" check) || exit
        command+=(-m torch.distributed.run "${torchrun[@]}" "--nproc_per_node=${NPROC:-$processes}")
    elif [ -n "${NPROC:-}" ] && [[ $script != imagenet_@(nd|dp).py ]]; then
        nodes+=(-g "$NPROC")
    fi
    # The same command, run again, resumes from the last snapshot.
    command+=("$root/$script" "${nodes[@]}" -b "$batch" --train-time "$hours" --name "$name")
    command+=(--resume auto ${ARCH:+-a "$ARCH"} "$@" ${DATA:+"$DATA"})

    for ((number = 1; number <= $#; number++)); do # of several, the last one counts
        case ${!number} in
        --output-dir=*) runs=${!number#*=} ;;
        --output-dir) [ $number -eq $# ] || runs=${@:number+1:1} ;;
        esac
    done
    export IMAGENET_SUITE=launcher:$name # the mark by which scripts/cleanup.sh knows its own
    log_to "$runs/$name/$log"
    echo "+${MASTER_ADDR:+ MASTER_ADDR=$MASTER_ADDR}$(printf ' %q' "${command[@]}")"
    exec "${command[@]}"
}
