# Sourced by the other scripts: --help, errors, and the Python environment.

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

# use_environment [REQUIREMENTS_FILE ...]: choose $PYTHON, installing and building what is missing.
use_environment() {
    choose_python "$@"
    # The build may take long (compiler, import of torch), so it ends when this shell ends.
    IMAGENET_LAUNCHER=$BASHPID "$PYTHON" "$root/scripts/build_region_decode.py" --if-missing
}

# choose_python [REQUIREMENTS_FILE ...]: choose $PYTHON, installing what is missing. This is the
# active environment if it has everything and its torch can use the GPUs. Otherwise it is .venv,
# with the tested versions whose torch fits the GPUs' driver. PYTHON=... (default: python3) creates
# .venv on first use, and again when versions or driver have changed. With TORCH=oldest it is
# .venv-oldest, with the oldest torch.
choose_python() {
    local files=("$root/requirements.txt" "$@") venv=$root/.venv base=${PYTHON:-python3} why
    local shell=$BASHPID
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ "${TORCH:-}" != oldest ] &&
        python "$root/scripts/check_requirements.py" "${files[@]}" 2>/dev/null; then
        if why=$(gpus_of python check 2>&1 >/dev/null); then
            PYTHON=$(command -v python)
            return
        fi
        echo "The active environment is not used: ${why#error: }"
    fi
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "Python 3.10 or newer is needed: set PYTHON=/path/to/python"
    local chosen
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
    ! grep -qsxF "$required" "$stamp" || return 0
    echo "Installing the versions of ${constraints#"$root/"} (${chosen#*$'\n'}) into $venv" \
        "(torch with CUDA: about 5.5 GB, one to several minutes) ..."
    # Remove the stamp first: after an interruption it would name versions that are not installed.
    grep -qsF "$versions" "$stamp" || rm -f "$stamp"
    "$base" -m venv "$venv" || fail "$base cannot make a virtual environment (on Debian and" \
        "Ubuntu: apt install python3-venv)"
    local arguments=() output
    for file in "${files[@]}"; do arguments+=(-r "$file"); done
    if ! output=$("$PYTHON" -m pip install -qq --disable-pip-version-check -c "$constraints" \
        "${arguments[@]}" 2>&1); then
        echo "$output" >&2
        [[ $output != @(*"No matching distribution"*|*ResolutionImpossible*) ]] ||
            fail "pip finds no fitting versions for $("$PYTHON" -V): is there internet? 3.10 to" \
                "3.14 have all of them; remove $venv and name another Python with PYTHON=..."
        fail "the installation did not finish; run this again to continue"
    fi
    # quickstart.sh and test.sh share .venv: each adds its line, so neither installs again.
    echo "$required" >>"$stamp"
}
