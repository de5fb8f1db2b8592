#!/usr/bin/env bash
# ViT-B/32 on CIFAR-10, pretrained, 26 epochs on 4 nodes: DDP against FSDP, each with the largest
# batch that fits into the GPUs' memory.
#
#   bash scripts/studies/vit_cifar10.sh HOSTS_FILE DATA \
#       [OPTIONS of scaling_study.sh] [-- OPTIONS of the training]
#
# Make DATA on each node. CIFAR-10 has no validation part, so its test images also choose the best
# epoch.
#
#   python scripts/prepare_data.py cifar10 data/cifar && ln -s val data/cifar/test
#
# --store s3://BUCKET/PREFIX copies the best checkpoints to S3. Without GPUs the largest batch cannot
# be measured: use -b 64, for example. Instead of HOSTS_FILE, use --simulate=4 or --slurm=OPTIONS. If
# timm is installed here and on the nodes, the model is its vit_base_patch32_224, else torchvision's
# vit_b_32. The images of 32 pixels are enlarged to 224.
#
# NOT RUN ON GPUS YET. The learning rate is a first guess.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
[ $# -ge 2 ] || { sed -n '5s/^# *//p' "$0" >&2 && exit 2; }
source "$(dirname "$0")/../environment.sh"
find_python
export PYTHON
model=vit_b_32
! "$PYTHON" -c 'import importlib.util as i; exit(not i.find_spec("timm"))' ||
    model=vit_base_patch32_224
exec bash "$root/scripts/scaling_study.sh" "$1" --name vit_cifar10 --nodes 4 -b largest \
    --vary script=imagenet_ddp.py,imagenet_fsdp.py "${@:3}" -- \
    imagenet_ddp.py -a $model --pretrained --image-size 224 --epochs 26 \
    --optimizer adamw --lr 1e-4 --wd 0.05 --wd-norm 0 --lr-schedule cosine --warmup-epochs 1 "$2"
