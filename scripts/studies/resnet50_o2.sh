#!/usr/bin/env bash
# ResNet-50 with Apex's O2, 2 epochs of ImageNet on 1 and on 2 nodes: is it twice as fast?
#
#   bash scripts/studies/resnet50_o2.sh HOSTS_FILE DATA \
#       [OPTIONS of scaling_study.sh] [-- OPTIONS of the training]
#
# NOT RUN ON GPUS YET. 208 images per GPU are meant for 16 GB of memory. Look at `GPU utilisation` in
# the log book: above 95 %, reading images does not slow down training.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
[ $# -ge 2 ] || { sed -n '4s/^# *//p' "$0" >&2 && exit 2; }
exec bash "$(dirname "$0")/../scaling_study.sh" "$1" --name resnet50_o2 --nodes 1,2 \
    --lr-scaling linear "${@:3}" -- \
    imagenet_ddp_apex.py -a resnet50 --opt-level O2 -b 208 --epochs 2 "$2"
