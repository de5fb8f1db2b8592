#!/usr/bin/env bash
# ViT-B/32 on CIFAR-10, pretrained, 26 epochs on 4 nodes: DDP against FSDP. The images of 32 pixels
# are enlarged to 224 on their way.
#
#   python scripts/prepare_data.py cifar10 data/cifar        # on each node
#   bash scripts/studies/vit_cifar10.sh HOSTS_FILE DATA [OPTIONS of scaling_study.sh]
#
# NOT RUN ON GPUS YET. Batch and learning rate are a first guess: -b is to be the largest that fits
# (try it with --dummy). Say --store s3://BUCKET/PREFIX in this file for the best checkpoints in S3,
# and --pretrained FILE where there is no internet.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '6s/^# *//p' "$0" >&2 && exit 2; }
scripts=$(cd "$(dirname "$0")/.." && pwd)
exec bash "$scripts/scaling_study.sh" "$1" --name vit_cifar10 --nodes 4 \
    --vary script=imagenet_ddp.py,imagenet_fsdp.py "${@:3}" -- \
    imagenet_ddp.py -a vit_b_32 --pretrained --image-size 224 -b 64 --epochs 26 \
    --optimizer adamw --lr 1e-4 --wd 0.05 --wd-norm 0 --lr-schedule cosine --warmup-epochs 1 "$2"
