#!/usr/bin/env bash
# Train on several machines that may fail and come back: run the same line on every one of them.
#
#   MASTER_ADDR=IP bash scripts/elastic_train.sh \
#       TRAIN_HOURS MIN:MAX SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]
#
#   TRAIN_HOURS  stop with a snapshot after this much training (3.0)
#   MIN:MAX      with how many machines training goes on, and how many there are (1:2)
#   SAVE_NAME    the run directory is runs/SAVE_NAME, on a file system that all machines share; a run
#                that is there already is continued
#   BATCH_SIZE   images a step and process (per GPU)
#
# MASTER_ADDR is the IP address of the machine where they meet, MASTER_PORT (8888) a free port of
# it; MAX_RESTARTS (100) is how many failures a machine puts up with. DATA=... ARCH=... SCRIPT=...
# NPROC=... in the environment: see scripts/launch.sh.
set -euo pipefail
source "$(dirname "$0")/launch.sh"

[ $# -ge 4 ] || fail "usage: MASTER_ADDR=IP bash scripts/elastic_train.sh TRAIN_HOURS MIN:MAX" \
    "SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]"
hours=$1 nodes=$2 name=$3 batch=$4
shift 4
[ $# -eq 0 ] || [ "$1" = -- ] || fail "$1: put options of the training script after --"
need_number MIN:MAX "$nodes" '[1-9][0-9]*:[1-9][0-9]*'
[ "${nodes%:*}" -le "${nodes#*:}" ] || fail "MIN:MAX is $nodes, and the first is the larger one"
restarts=${MAX_RESTARTS:-100}
need_number MAX_RESTARTS "$restarts" '[1-9][0-9]*'
need_master
use_environment
address=$(ask_network address_towards "$MASTER_ADDR")
[ -n "$address" ] || fail "there is no way from here to MASTER_ADDR=$MASTER_ADDR: is the link up?"
rank=_$(hostname) # node ranks change with the nodes that are there; the log has the node's name
# A node whose own name does not resolve can join only by its address, and has to be told whether
# the others meet here.
is_host=false
[ -z "$(ask_network is_here "$MASTER_ADDR")" ] || is_host=true
# Or else training's own meeting point is torchrun's: a node that comes back finds it in use, and a
# restart may find the addresses of processes that have ended.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
launch "$hours" "$name" "$batch" "--nnodes=$nodes" --rdzv_backend=c10d "--rdzv_id=$name" \
    "--rdzv_endpoint=$MASTER_ADDR:${MASTER_PORT:-8888}" "--rdzv_conf=is_host=$is_host" \
    "--local_addr=$address" "--max_restarts=$restarts" "$@"
