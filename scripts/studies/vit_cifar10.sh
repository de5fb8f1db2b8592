#!/usr/bin/env bash
# ViT-B/32 on CIFAR-10, pretrained, 25 epochs on 4 nodes: DDP against FSDP.
#
#   python scripts/prepare_data.py cifar10 data/cifar        # on each node
#   bash scripts/studies/vit_cifar10.sh HOSTS_FILE DATA [OPTIONS of scaling_study.sh]
#
# NOT RUN ON GPUS YET. Batch and learning rate are a first guess: -b is to be the largest that fits
# (try it with --dummy). Say --store s3://BUCKET/PREFIX in this file for the best checkpoints in S3.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '5s/^# *//p' "$0" >&2 && exit 2; }
scripts=$(cd "$(dirname "$0")/.." && pwd)
exec bash "$scripts/scaling_study.sh" "$1" --name vit_cifar10 --nodes 4 \
    --vary script=imagenet_ddp.py,imagenet_fsdp.py "${@:3}" -- \
    imagenet_ddp.py -a vit_b_32 --pretrained -b 64 --lr 0.01 --epochs 25 "$2"
