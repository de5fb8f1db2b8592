#!/usr/bin/env bash
# From a fresh clone to curves: bash scripts/quickstart.sh [DATA]
#
# Installs missing packages. Makes a small set of drawn images, unless you give
# DATA, a folder with train/CLASS/ and val/CLASS/. Trains a ResNet-18 with one
# process and with two, at the same global batch size, and compares both runs.
# Without a GPU, each process has one core. Rerunning it skips finished work.
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
data=data/sample
if [ $# -gt 0 ]; then # relative to the current folder
    data=$(CDPATH='' cd -- "$1" 2>/dev/null && pwd) || fail "there is no folder $1"
fi
place=$root/ # before paths that the user types, unless he is there
[ "$PWD" != "$root" ] || place=
cd "$root"
started=$SECONDS
say() { printf '\n== %s\n' "$*"; }

say "1/4 environment"
use_environment
(gpus_of "$PYTHON" check) >/dev/null # fail here, before drawing images
echo "using $PYTHON"

say "2/4 data"
if [ $# -gt 0 ]; then
    echo "using $data"
else
    "$PYTHON" scripts/prepare_data.py sample "$data"
fi
# If a run of this name used another data set, append a number to the name.
label=$("$PYTHON" - "$data" <<'PYTHON'
import itertools, json, pathlib, sys

name = f"quickstart_{pathlib.Path(sys.argv[1]).name}"
for number in itertools.count(1):
    label = name if number == 1 else f"{name}.{number}"
    options = pathlib.Path("runs", f"{label}_1", "options.json")
    if not options.is_file() or json.loads(options.read_text())["data"] == sys.argv[1]:
        break
print(label)
PYTHON
)

# On the CPU, threads that wait for each other should leave the cores to the loader workers.
export OMP_WAIT_POLICY=passive
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
processes=2
if [ "$gpus" = 0 ]; then # a core stands for a GPU: the picture shows scaling on any machine
    export OMP_NUM_THREADS=1
elif [ "$gpus" = 1 ]; then
    processes=1
    echo "note: there is one GPU here, so imagenet_ddp.py runs with one process as well"
fi
options=(-a resnet18 --image-size 64 --crop-scale 0.35 --epochs 8 --lr 0.03 --lr-schedule cosine
    --warmup-epochs 1 --resume auto)

train() { # run name, script and its options
    local name=$1
    shift
    if grep -qs '"finished_because": "epochs"' "runs/$name/summary.json"; then
        echo "${place}runs/$name is finished already (remove the folder to train it again)"
        return
    fi
    set -- "$@" --name "$name" "${options[@]}" "$data"
    echo "+ python$(printf ' %q' "$@")"
    "$PYTHON" "$@"
}

say "3/4 training: one process, then $processes"
train "${label}_1" imagenet_nd.py -b 64
train "${label}_$processes-ddp" imagenet_ddp.py -g "$processes" -b $((64 / processes))

say "4/4 pictures"
mkdir -p "runs/$label"
words=runs/$label/compare.txt
"$PYTHON" scripts/compare_runs.py "runs/${label}_1" "runs/${label}_$processes-ddp" \
    --labels "1 process" "$processes process$([ "$processes" = 1 ] || echo es) (DDP)" \
    --out "runs/$label" | tee "$words"

[ $# -gt 0 ] || data=$place$data
if [ $# -gt 0 ] || [ "$gpus" != 0 ]; then
    next=$(printf '%q %q -a resnet50 %q' "$PYTHON" "${place}imagenet_nd.py" "$data")
else
    next=$(printf '%q %q' "$PYTHON" "${place}scripts/prepare_data.py")
    next+=" split PHOTOS --val 0.2 # PHOTOS/CLASS/*.jpg: yours"
fi

say "done in $((SECONDS - started)) s"
sed '/^$/,$d' "$words" # the comparison in words
cat <<TEXT

The picture of both runs: ${place}runs/$label/overlay.png
The next command:         $next
TEXT
