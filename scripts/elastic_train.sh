#!/usr/bin/env bash
# Train on several machines that may fail and come back: run the same command on each of them.
#
#   MASTER_ADDR=IP bash scripts/elastic_train.sh \
#       TRAIN_HOURS MIN:MAX SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]
#
#   TRAIN_HOURS  stop after this many hours of training, with a snapshot (such as 3.0)
#   MIN:MAX      how many machines training needs at least, and how many there are (such as 1:2)
#   SAVE_NAME    the run directory is runs/SAVE_NAME, on a file system that all machines share
#   BATCH_SIZE   images per step and process (per GPU)
#
# This is torchrun's c10d rendezvous, at the IP address MASTER_ADDR and its port MASTER_PORT (8888);
# each machine allows MAX_RESTARTS (100) failures. A run that exists already is resumed. If the
# master fails, see scripts/README.md; with train_on_nodes.sh --elastic any machine may fail.
# DATA=... ARCH=... SCRIPT=... NPROC=...: see scripts/launch.sh.
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
place=$(use_python -m utils.extras.preflight rendezvous "$MASTER_ADDR:$MASTER_PORT") || exit
echo "torchrun waits for ${2%:*} nodes at $MASTER_ADDR:$MASTER_PORT, silently, for up to 10 minutes"
# Restarts continue one run, and an error in the options ends torchrun. torchrun's own store would be
# in use for a node that comes back, and keep dead addresses.
variables=(IMAGENET_ELASTIC=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
# Without is_host and its address, a node whose own name does not resolve cannot join. Nodes that
# notice a loss late have 15 s to join the others (torchrun's own choice is 30).
torchrun=("--nnodes=$2" --rdzv_backend=c10d "--rdzv_id=$3" "--local_addr=${place% *}"
    "--rdzv_conf=is_host=${place#* },last_call_timeout=15"
    "--rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT" "--max_restarts=$MAX_RESTARTS")
log=node_$(hostname).log # node ranks change as nodes come and go
launch "$1" "${@:3}"
