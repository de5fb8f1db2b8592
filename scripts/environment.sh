# Sourced by the other scripts: --help, errors, and the Python environment.

# Variables that users export for their own shells and programs. They would change what `cd`, grep,
# Python and pip do here. (The scripts run `bash -p`, which ignores exported functions and options.)
unset CDPATH POSIXLY_CORRECT GREP_OPTIONS GREP_COLOR PYTHONHOME PYTHONSAFEPATH PYTHONINSPECT
unset PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT shell
export -n SHELLOPTS BASHOPTS # `set -e` is meant for these scripts, not for what they start

# Streams that the caller has closed (`ssh HOST 'COMMAND >&- 2>&- <&-'`): files would get their places.
true 3>&2 || exec 2>/dev/null
true 2>/dev/null 3>&1 || exec >/dev/null
true 2>/dev/null 3<&0 || exec </dev/null

[[ ${PYTHON:-} != [!/]*/* ]] || PYTHON=$PWD/$PYTHON # they run it in other folders

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# show_help "$@": with --help, print the comment at the head of the script and exit.
show_help() {
    [[ ${1:-} == @(-h|--help) ]] || return 0
    sed -n '2,${/^#\( \|$\)/!q;s/^# \{0,1\}//;p}' "$0"
    exit 0
}

fail() {
    echo "error: $*" >&2
    exit 2
}

# gpus_of PYTHON choose|check: replace this subshell by choose_torch.py. It ends when the main shell
# ($shell, or else $$) ends.
gpus_of() { cd "$root" && IMAGENET_LAUNCHER=${shell:-$$} exec "$1" scripts/choose_torch.py "$2"; }

# pythons: print the Pythons to choose from, in order. PYTHON=/path/to/python is then the only one.
pythons() {
    [ -z "${PYTHON:-}" ] || { echo "$PYTHON" && return; }
    [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || ! type -P python || return 0
    type -P python3 python || true
}

# find_python: set $PYTHON to the first of `pythons`, then .venv's, that has all packages. If none
# has them, take the first one. This installs nothing.
find_python() {
    local python listed
    mapfile -t listed < <(pythons)
    for python in "${listed[@]}" "$root/.venv/bin/python"; do
        if "$python" "$root/scripts/check_requirements.py" "$root/requirements.txt" 2>/dev/null; then
            PYTHON=$python
            return
        fi
    done
    PYTHON=${listed[0]:-${PYTHON:-python3}}
}

# find_plain_python: set $PYTHON for a command that needs no packages: the active environment's,
# else .venv's, as the system's may be too old.
find_plain_python() {
    local own=$root/.venv/bin/python
    [ -n "${PYTHON:-}${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ ! -x "$own" ] || PYTHON=$own
    PYTHON=${PYTHON:-python3}
}

# use_environment [REQUIREMENTS_FILE ...]: choose $PYTHON, installing and building what is missing.
use_environment() {
    choose_python "$@"
    # The build may take long (compiler, import of torch), so it ends when this shell ends.
    IMAGENET_LAUNCHER=$BASHPID "$PYTHON" "$root/scripts/build_region_decode.py" --if-missing
}

# choose_python [REQUIREMENTS_FILE ...]: choose $PYTHON, installing what is missing. It is the first
# of `pythons` that has everything and whose torch can use the GPUs. Otherwise it is .venv, with the
# tested versions whose torch fits the GPUs' driver; the first of `pythons` creates it on first use,
# and fills it again when versions or driver have changed. With TORCH=oldest it is .venv-oldest,
# with the oldest torch.
choose_python() {
    local files=("$root/requirements.txt" "$@") venv=$root/.venv base= python why listed chosen
    local shell=$BASHPID
    mapfile -t listed < <(pythons)
    # A .venv that the user has made and filled is not filled again.
    [ -n "${PYTHON:-}" ] || [ ! -x "$venv/bin/python" ] || [ -e "$venv/.installed" ] ||
        listed+=("$venv/bin/python")
    for python in "${listed[@]}"; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
        base=${base:-$python}
        [ "${TORCH:-}" != oldest ] || break
        if why=$("$python" "$root/scripts/check_requirements.py" "${files[@]}" 2>&1) &&
            why=$(gpus_of "$python" check 2>&1 >/dev/null); then
            PYTHON=$python
            echo "Python: $PYTHON, which has all packages"
            return
        fi
        # Nobody expects packages in the system's own Python.
        [[ $python != "${listed[0]}" || $python == /usr/bin/* ]] || echo "$python is not used: ${why#error: }"
    done
    [ -n "$base" ] || fail "Python 3.10 or newer is needed: set PYTHON=/path/to/python"
    if [ "${TORCH:-}" = oldest ]; then
        venv=$root/.venv-oldest
        chosen=$'constraints-cuda12.txt\nTORCH=oldest'
    else
        chosen=$(gpus_of "$base" choose) || exit
    fi
    local constraints=$root/scripts/${chosen%%$'\n'*} stamp=$venv/.installed versions required
    versions="$(cat "$constraints" "$root/scripts/constraints-packages.txt" | cksum):"
    required="$versions $(cat "${files[@]}" | cksum)"
    PYTHON=$venv/bin/python
    if grep -qsxF "$required" "$stamp"; then
        echo "Python: $PYTHON, which has all packages"
        return
    fi
    echo "Installing the versions of ${constraints#"$root/"} (${chosen#*$'\n'}) into $venv" \
        "(torch with CUDA: about 5.5 GB, one to several minutes)."
    echo "PYTHON=/path/to/python uses an environment of your own instead; it needs the packages of" \
        "requirements.txt."
    if [ -t 0 ] && [ -t 2 ]; then
        read -r -p "Press Enter to install, or Ctrl-C to stop: " || fail "nothing was installed"
    fi
    # Remove the stamp first: after an interruption it would name versions that are not installed.
    grep -qsF "$versions" "$stamp" || rm -f "$stamp"
    # It makes no folder in place of a link, such as one to a disk with more space.
    "$base" -m venv "$(readlink -m "$venv")" || fail "$base cannot make a virtual environment (on Debian and" \
        "Ubuntu: apt install python3-venv)"
    local arguments=() errors
    for file in "${files[@]}"; do arguments+=(-r "$file"); done
    # Descriptor 3: pip's progress goes to the terminal; its errors are shown and kept.
    if ! { errors=$(set -o pipefail && "$PYTHON" -m pip install --disable-pip-version-check -c "$constraints" \
        "${arguments[@]}" 2>&1 >&3 3>&- | while IFS= read -r line || [ -n "$line" ]; do
            printf '%s\n' "$line" >&2 # at once, and before our own last line
            printf '%s\n' "$line"
        done); } 3>&1; then
        [[ $errors != @(*"No matching distribution"*|*ResolutionImpossible*) ]] ||
            fail "pip finds no fitting versions for $("$PYTHON" -V): is there internet? 3.10 to" \
                "3.14 have all of them; remove $venv and name another Python with PYTHON=..."
        fail "the installation did not finish; run this again to continue"
    fi
    # quickstart.sh and test.sh share .venv: each adds its line, so neither installs again.
    echo "$required" >>"$stamp"
}
