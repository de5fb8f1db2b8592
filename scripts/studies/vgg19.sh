#!/usr/bin/env bash
# VGG19 with 20 classes and a pretrained encoder, all weights trained, for 2 hours on 1, 2, 4 and 8
# nodes: 32 images per GPU, a constant learning rate of 1e-4 that grows with the square root of the
# nodes. The model with the lowest validation loss is tested.
#
#   bash scripts/studies/vgg19.sh HOSTS_FILE DATA \
#       [OPTIONS of scaling_study.sh] [-- OPTIONS of the training]
#
# NOT RUN ON GPUS YET. The published experiment used g4dn.2xlarge nodes (8 vCPUs, one T4). The
# study's page has the same table. --classes 20 takes the first 20 class folders of DATA. The test
# columns need DATA/test. The published optimiser is unknown; here it is SGD with momentum.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
[ $# -ge 2 ] || { sed -n '6s/^# *//p' "$0" >&2 && exit 2; }
exec bash "$(dirname "$0")/../scaling_study.sh" "$1" --name vgg19 --nodes 1,2,4,8 --hours 2 \
    --lr-scaling sqrt "${@:3}" -- \
    imagenet_ddp.py -a vgg19 --pretrained --classes 20 -b 32 --lr 1e-4 --best-by loss "$2"
