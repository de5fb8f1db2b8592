# Sourced by one_node_train.sh, multi_node_train.sh and elastic_train.sh: their common code.
#
# From the environment:
#   SCRIPT   training script (imagenet_ddp.py)
#   DATA     image folder (the script's own default: $IMAGENET_DIR, else /data)
#   ARCH     model (the script's own default)
#   NPROC    processes on this node (one per GPU; one without GPUs)

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# need_number NAME VALUE PATTERN WORDS: the argument NAME must match PATTERN; WORDS describe it.
need_number() { [[ $2 =~ ^$3$ ]] || fail "$1 is $2: it must be $4"; }

# need_several_nodes SCRIPT: fail unless SCRIPT can train on several nodes.
need_several_nodes() {
    case $1 in
    imagenet_nd.py | imagenet_dp.py) fail "$1 trains on one node: use imagenet_ddp.py" ;;
    esac
}

# need_master: fail unless MASTER_ADDR is set and SCRIPT can train on several nodes. A port follows
# the address, so an IPv6 address gets brackets.
need_master() {
    [ -n "${MASTER_ADDR:-}" ] ||
        fail "MASTER_ADDR is not set: on every node, export MASTER_ADDR=<IP address of node 0>" \
            "(this node has $(hostname -I 2>/dev/null || echo '?'))"
    [[ $MASTER_ADDR != *:*:* || $MASTER_ADDR == \[* ]] || MASTER_ADDR=[$MASTER_ADDR]
    need_several_nodes "${SCRIPT:-}"
}

# use_python WORD ...: run Python in the repository; call this in a subshell. The Python process
# ends when this shell ends.
use_python() { cd "$root" && IMAGENET_LAUNCHER=$$ exec "$PYTHON" "$@"; }

# option NAME DEFAULT WORD ...: print the last value of option NAME among the words, or the default.
option() {
    local name=$1 value=$2
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in
        "$name="*) value=${1#*=} ;;
        "$name") value=${2:-$value} ;;
        esac
        shift
    done
    echo "$value"
}

# log_to FILE: write a copy of all further output to FILE. ~ is the home folder, as for the script.
log_to() {
    local file=$1
    [[ $file != "~/"* ]] || file=~/${file:2}
    mkdir -p "$(dirname "$file")" || fail "cannot write the log $file"
    # tee must survive Ctrl-C (-i), the end of the reader (-p) and that of the terminal (HUP), and a
    # signal to all processes, as from systemd (TERM), until training has ended.
    exec > >(trap '' HUP TERM && exec tee -i -p -a "$file") \
        2> >(trap '' HUP TERM && exec tee -i -p -a "$file" >&2)
}

# launch HOURS NAME BATCH_SIZE [-- TRAINING OPTION ...]: replace this shell by the training.
#
# First the pre-flight check runs, with the arguments in `preflight`. If there are none, it is left
# out. Then torchrun starts the processes, with the options in `torchrun` and the environment in
# `variables`. Without options in `torchrun`, it trains on this node alone. The output is also
# written to `log` in the run directory.
torchrun=() preflight=() variables=() log=node0.log
launch() {
    local hours=$1 name=$2 batch=$3 script=${SCRIPT:-imagenet_ddp.py} processes seconds
    shift 3
    [ $# -eq 0 ] || [ "$1" = -- ] || fail "$1: put options of the training script after --"
    [ $# -eq 0 ] || shift
    need_number TRAIN_HOURS "$hours" '([0-9]+\.?[0-9]*|\.[0-9]+)' "a number such as 1.5"
    need_number BATCH_SIZE "$batch" '[1-9][0-9]*' "a whole number, at least 1"
    need_number NPROC "${NPROC:-1}" '[1-9][0-9]{0,5}' "a whole number, at least 1"
    [ -f "$root/$script" ] || fail "SCRIPT=$script does not exist in $root"
    use_environment
    (use_python -c 'import sys; from utils.start.option_types import run_name
try: run_name(sys.argv[1])
except Exception as error: sys.exit(f"error: {error}")' "$name") || exit 2

    local machine most cores
    machine=$(gpus_of "$PYTHON" check) || exit
    read -r processes most cores <<<"$machine"
    processes=${NPROC:-$processes}
    [ "$processes" -le "$most" ] ||
        fail "NPROC is $processes: it must be at most $most on this machine"

    # The same command, run again, resumes from the last snapshot.
    local training=("$root/$script" -b "$batch" --train-time "$hours" --name "$name" --resume auto)
    # Only the hours end the training, and the learning rate does not depend on the speed of this
    # machine, unless options say otherwise.
    [ -n "$(option --epochs '' "$@")$(option --recipe '' "$@")" ] ||
        training+=(--epochs 100000 --lr-schedule constant)
    training+=(${ARCH:+-a "$ARCH"} "$@" ${DATA:+"$DATA"})
    export IMAGENET_SUITE=launcher:$name # scripts/cleanup.sh recognises it
    log_to "$(option --output-dir runs "$@")/$name/$log"
    if [[ $script == imagenet_@(nd|dp).py ]]; then
        echo "+$(printf ' %q' "$PYTHON" "${training[@]}")"
        exec "$PYTHON" "${training[@]}"
    fi

    if [ ${#preflight[@]} -gt 0 ]; then
        seconds=$(option --dist-timeout 300 "$@")
        preflight=(-m utils.start.preflight "${preflight[@]}" "$processes" "$MASTER_ADDR:$MASTER_PORT")
        echo "+ (cd$(printf ' %q' "$root") &&$(printf ' %q' "$PYTHON" "${preflight[@]}" "$seconds"))"
        (use_python "${preflight[@]}" "$seconds") || exit
    fi
    [ ${#torchrun[@]} -gt 0 ] || torchrun=(--nnodes=1 --node_rank=0 --master_addr=127.0.0.1
        "--master_port=$(use_python -c 'from utils.start import addresses; print(addresses.free_port())')")
    # torchrun's default is one thread. Threads that spin at barriers slow down loader workers.
    local threads=$((cores / processes))
    variables+=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}")
    variables+=("OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}")
    export "${variables[@]}"
    torchrun+=("--nproc_per_node=$processes" "${training[@]}")
    echo "+ ${variables[*]}$(printf ' %q' "${PYTHON%python*}torchrun" "${torchrun[@]}")"
    exec "$PYTHON" "$root/scripts/torchrun.py" "${torchrun[@]}"
}
