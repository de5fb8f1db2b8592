#!/usr/bin/env bash
# Train on several machines that may fail and come back: run the same command on
# each of them.
#
#   MASTER_ADDR=IP bash scripts/elastic_train.sh \
#       TRAIN_HOURS MIN:MAX SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]
#
#   TRAIN_HOURS  stop with a snapshot after this many hours of training (3.0).
#                Epochs are then unlimited and the learning rate constant,
#                unless --epochs or --recipe is given
#   MIN:MAX      smallest and largest number of machines to train on, such as 1:2
#   SAVE_NAME    name of the run; runs/SAVE_NAME must be on a file system that
#                all machines share
#   BATCH_SIZE   images per step and process (per GPU)
#
# An existing run of this name is resumed. The machines meet at MASTER_ADDR, the
# IP address of one of them, and port MASTER_PORT (8888), by torchrun's c10d
# rendezvous. Training ends after MAX_RESTARTS (100) failures on a machine. If the
# machine at MASTER_ADDR fails, see scripts/README.md. With train_on_nodes.sh
# --elastic, any machine may fail.
#
# Also in the environment: DATA, ARCH, SCRIPT, NPROC; see scripts/launch.sh.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/launch.sh"
show_help "$@"

[ $# -ge 4 ] || fail "usage: MASTER_ADDR=IP bash scripts/elastic_train.sh TRAIN_HOURS MIN:MAX" \
    "SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]"
need_number MIN:MAX "$2" '[1-9][0-9]*:[1-9][0-9]*' "two whole numbers such as 1:2"
[ "${2%:*}" -le "${2#*:}" ] || fail "MIN:MAX is $2, but MIN is larger than MAX"
need_number MAX_RESTARTS "${MAX_RESTARTS:=100}" '[1-9][0-9]*' "a whole number, at least 1"
need_master
use_environment
MASTER_PORT=${MASTER_PORT:-8888}
place=$(use_python -m utils.start.preflight rendezvous "$MASTER_ADDR:$MASTER_PORT") || exit
nodes="at least ${2%:*} of ${2#*:} nodes"
echo "torchrun waits for $nodes at $MASTER_ADDR:$MASTER_PORT, silently, for up to 10 minutes"
# Training uses a store of its own, because torchrun's store keeps the addresses of lost nodes.
variables=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
# Without is_host and local_addr, a node that cannot resolve its own name cannot join. Nodes that
# notice a loss late have 15 s to join the others (torchrun's default: 30).
torchrun=("--nnodes=$2" --rdzv_backend=c10d "--rdzv_id=$3" "--local_addr=${place% *}"
    "--rdzv_conf=is_host=${place#* },last_call_timeout=15"
    "--rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT" "--max_restarts=$MAX_RESTARTS")
log=node_$HOSTNAME.log # node ranks change as nodes come and go
launch "$1" "${@:3}"
