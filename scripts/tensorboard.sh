#!/usr/bin/env bash
# TensorBoard for all runs: bash scripts/tensorboard.sh [HOSTS_FILE]
#
# With HOSTS_FILE (one ssh host per line; see scripts/ssh/hosts.py) it copies the
# event files of these hosts into runs/hosts/HOST, at the start and every minute.
# On each host it reads the same path as on this machine (if it is in the home
# folder, as seen from there), unless runs=/path/to/runs follows the host.
#
# In the environment:
#   RUNS   folder of run directories (runs)
#   PORT   port of TensorBoard on this machine (6006)
#   EVERY  seconds between two copies (60)
[[ $- == *p* ]] || exec "$BASH" -p "$0" "$@" # without functions that the caller exports
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_help "$@"
[ $# -le 1 ] || fail "at most one HOSTS_FILE: bash scripts/tensorboard.sh [HOSTS_FILE]"
runs=${RUNS:-$root/runs} port=${PORT:-6006} every=${EVERY:-60} hosts=${1:-}
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] && [ "$port" -le 65535 ] || fail "PORT=$port is not the number of a port"
[[ $every =~ ^[1-9][0-9]*$ ]] || fail "EVERY=$every is not a whole number of seconds"
choose_python
[ -z "$hosts" ] || listed=$("$PYTHON" "$root/scripts/ssh/hosts.py" "$hosts") || exit
mkdir -p "$runs" || fail "cannot make the folder $runs"
runs=$(cd "$runs" && pwd)
ssh=(ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10)

# fetch ADDRESS ADDRESS_FOR_RSYNC NAME [PATH]: copy the event files below PATH, with rsync, or with
# tar if one of the machines has no rsync.
fetch() {
    local host=$1 target=$runs/hosts/$3 path=${4:-${runs#"${HOME:+$HOME/}"}} quoted there
    mkdir -p "$target"
    quoted=\'${path//\'/\'\\\'\'}\'
    # The login shell there may be csh or fish, so sh reads the commands.
    there=$("${ssh[@]}" "$host" sh <<<"cd $quoted && { command -v rsync || true; }") || return 1
    if [ -n "$there" ] && command -v rsync >/dev/null; then
        rsync -a -s --prune-empty-dirs -e "${ssh[*]}" --exclude='/hosts' --include='*/' \
            --include='*tfevents*' --exclude='*' "$2:$path/" "$target/"
    else
        "${ssh[@]}" "$host" sh <<<"cd $quoted && find . -path ./hosts -prune -o -name '*tfevents*' \
            -type f -print0 | tar --null --files-from=- --create --gzip" |
            tar --extract --gzip --directory="$target"
    fi
}

# fetch_all: fetch from all hosts. What this has to say is printed when it changes: many jobs keep
# their runs on the first host alone.
said=
fetch_all() {
    local host now
    now=$(while read -ra host; do
        fetch "${host[@]}" || echo "note: no event files from ${host[0]} this time: see above"
    done <<<"$listed" 2>&1)
    [ "$now" = "$said" ] || echo "$now" >&2
    said=$now
}

! (: </dev/tcp/127.0.0.1/"$port") 2>/dev/null || fail "port $port is taken: choose another, PORT=6007"

if [ -n "$hosts" ]; then
    fetch_all
    # Repeat while this shell's process lives; `exec` below turns it into TensorBoard.
    main=$$
    (
        while true; do
            for ((second = 0; second < every; second++)); do
                sleep 1
                kill -0 "$main" 2>/dev/null || exit 0
            done
            fetch_all
        done
    ) &
fi

host=$(hostname -I 2>/dev/null | cut -d' ' -f1) || host=
cat <<TEXT
On your laptop:  ssh -N -L $port:localhost:$port ${USER:-$(id -un 2>/dev/null || echo USER)}@${host:-$HOSTNAME}
then open        http://localhost:$port/#custom_scalars  (all runs overlaid; HPARAMS: a table)
(On AWS, use the public address of this machine, and add -i KEY.pem.)
TEXT
exec "$PYTHON" -m tensorboard.main --logdir "$runs" --host 127.0.0.1 --port "$port" \
    --reload_multifile true
