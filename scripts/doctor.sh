#!/usr/bin/env bash
# Check all nodes before training on them, from one machine, over ssh:
#
#   bash scripts/doctor.sh HOSTS_FILE [OPTIONS of scripts/doctor.py: --data DIR -a resnet50 ...]
#
#   HOSTS_FILE  one ssh host a line, node 0 first; what follows a host and # on a line is ignored
#
# Starts scripts/doctor.py on every node with its rank; the exit code is the worst of theirs (0 all
# is well, 1 warnings, 2 faults). Users, ports and keys are those of your ssh configuration.
#
# From the environment:
#   MASTER_ADDR  IP address of node 0 for the others (the one that ssh arrives at)
#   REMOTE_DIR   where this code is on the nodes (where it is here)
#   REMOTE_PYTHON  interpreter there (REMOTE_DIR/.venv/bin/python if there is one, else python3)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 2
}

[ $# -ge 1 ] || fail "usage: bash scripts/doctor.sh HOSTS_FILE [OPTIONS of scripts/doctor.py]"
[ -r "$1" ] || fail "$1 cannot be read: give a file with one ssh host a line"
mapfile -t hosts < <(sed 's/#.*//' "$1" | awk 'NF { print $1 }')
shift
[ ${#hosts[@]} -gt 0 ] || fail "the hosts file names no host"

folder=${REMOTE_DIR:-$root}
reach=(ssh -o BatchMode=yes -o ConnectTimeout=10)
if [ -z "${MASTER_ADDR:-}" ]; then
    # $SSH_CONNECTION: client address and port, then the server's own.
    line=$("${reach[@]}" "${hosts[0]}" 'echo "$SSH_CONNECTION"' </dev/null) ||
        fail "ssh ${hosts[0]} fails: try it by hand; it must log in without a question"
    MASTER_ADDR=$(awk '{ print $3 }' <<<"$line")
    [ -n "$MASTER_ADDR" ] || fail "set MASTER_ADDR to the IP address of node 0"
fi

# command RANK OPTION ...: the line for a node's shell.
command_of() {
    local python=${REMOTE_PYTHON:-} rank=$1
    shift
    printf 'cd %q && ' "$folder"
    if [ -n "$python" ]; then
        printf 'exec %q' "$python"
    else
        printf 'if [ -x .venv/bin/python ]; then p=.venv/bin/python; else p=python3; fi; exec "$p"'
    fi
    printf ' scripts/doctor.py --rank %s --nodes %s' "$rank" "${#hosts[@]}"
    printf ' %q' --master "$MASTER_ADDR" --wait 20 "$@"
}

said=$(mktemp -d)
nodes=()
clean_up() {
    for node in "${nodes[@]}"; do kill "$node" 2>/dev/null || true; done
    rm -rf "$said"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for rank in "${!hosts[@]}"; do
    # Node 0 tells all; what the others say is shown below, when they have something to say.
    to=/dev/stdout
    [ "$rank" = 0 ] || to=$said/$rank
    "${reach[@]}" "${hosts[$rank]}" "$(command_of "$rank" "$@")" </dev/null >"$to" 2>&1 &
    nodes+=($!)
done
worst=0
for rank in "${!hosts[@]}"; do
    code=0
    wait "${nodes[$rank]}" || code=$?
    [ "$code" != 255 ] || echo "[node$rank] ssh ${hosts[$rank]} failed: try it by hand"
    [ "$code" -le 2 ] || code=2
    [ "$code" -le "$worst" ] || worst=$code
    if [ "$rank" != 0 ] && [ "$code" != 0 ]; then
        sed "s/^/[node$rank] /" "$said/$rank"
    fi
done
nodes=()
exit "$worst"
