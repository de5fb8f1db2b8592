#!/usr/bin/env bash
# Train on several machines that may fail and come back: run the same line on each of them.
#
#   MASTER_ADDR=IP bash scripts/elastic_train.sh \
#       TRAIN_HOURS MIN:MAX SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]
#
#   TRAIN_HOURS  stop after this many hours of training, with a snapshot (such as 3.0)
#   MIN:MAX      how many machines training needs at least, and how many there are (such as 1:2)
#   SAVE_NAME    the run directory is runs/SAVE_NAME, on a file system that all machines share; a run
#                that exists already is resumed
#   BATCH_SIZE   images per step and process (per GPU); auto: as many as fit into memory
#
# MASTER_ADDR is the IP address of the machine where they meet, MASTER_PORT (8888) a free port
# there; MAX_RESTARTS (100) is how many failures a machine allows. DATA=... ARCH=... SCRIPT=...
# NPROC=... in the environment: see scripts/launch.sh.
set -euo pipefail
source "$(dirname "$0")/launch.sh"
show_help "$@"

[ $# -ge 4 ] || fail "usage: MASTER_ADDR=IP bash scripts/elastic_train.sh TRAIN_HOURS MIN:MAX" \
    "SAVE_NAME BATCH_SIZE [-- TRAINING OPTIONS]"
again="bash scripts/elastic_train.sh$(printf ' %q' "$@")"
for variable in DATA ARCH SCRIPT NPROC MASTER_PORT MAX_RESTARTS; do
    [ -z "${!variable:-}" ] || again="$variable=$(printf %q "${!variable}") $again"
done
hours=$1 nodes=$2 name=$3 batch=$4
shift 4
[ $# -eq 0 ] || [ "$1" = -- ] || fail "$1: put options of the training script after --"
need_number MIN:MAX "$nodes" '[1-9][0-9]*:[1-9][0-9]*' "two whole numbers such as 1:2"
[ "${nodes%:*}" -le "${nodes#*:}" ] || fail "MIN:MAX is $nodes, but MIN is larger than MAX"
restarts=${MAX_RESTARTS:-100}
need_number MAX_RESTARTS "$restarts" '[1-9][0-9]*' "a whole number, at least 1"
need_master
use_environment
address=$(ask_network address_towards "$MASTER_ADDR")
[ -n "$address" ] || fail "there is no route from here to MASTER_ADDR=$MASTER_ADDR: is the link up?"
rank=_$(hostname) # node ranks change as nodes come and go; the log has the node's name
# A node whose own name does not resolve can join only by its address, and by is_host; the meeting
# point's own node keeps it open beside torchrun (utils/launch/meeting_point.py).
# Otherwise training would use torchrun's own meeting point: a node that comes back would find it
# in use, and a restart might find the addresses of processes that have ended.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
launch "$hours" "$name" "$batch" "--nnodes=$nodes" --rdzv_backend=c10d "--rdzv_id=$name" \
    "--rdzv_endpoint=$MASTER_ADDR:${MASTER_PORT:-8888}" "--rdzv_conf=is_host=false" \
    "--local_addr=$address" "--max_restarts=$restarts" "$@"
