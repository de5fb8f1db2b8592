# Sourced by the other scripts: --help, errors, and the Python environment.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# show_help "$@": if --help is asked for, print the comment at the head of the script and end.
show_help() {
    case ${1:-} in
    -h | --help)
        sed -n '2,${/^#\( \|$\)/!q;s/^# \{0,1\}//;p}' "$0"
        exit 0
        ;;
    esac
}

fail() {
    echo "error: $*" >&2
    exit 2
}

# use_environment [REQUIREMENTS_FILE ...]: choose $PYTHON, installing and building what is missing.
use_environment() {
    choose_python "$@" || return 1
    "$PYTHON" "$root/scripts/build_region_decode.py" --if-missing
}

# choose_python [REQUIREMENTS_FILE ...]: choose $PYTHON, installing what is missing.
#
# Takes the active virtual or conda environment if it already has everything; otherwise .venv in
# the repository, created and filled on first use with the tested versions of constraints.txt.
# PYTHON=... in the environment chooses the interpreter that creates .venv (default python3).
choose_python() {
    local files=("$root/requirements.txt" "$@")
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] &&
        python "$root/scripts/check_requirements.py" "${files[@]}" 2>/dev/null; then
        PYTHON=$(command -v python)
        return
    fi
    local base=${PYTHON:-python3} stamp wanted
    PYTHON=$root/.venv/bin/python
    stamp=$root/.venv/.installed
    wanted=$(cat "${files[@]}" "$root/scripts/constraints.txt" | cksum)
    if [ -f "$stamp" ] && grep -qxF "$wanted" "$stamp"; then
        return
    fi
    echo "Installing into $root/.venv (torch with CUDA: about 5.5 GB, one to several minutes) ..."
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "error: Python 3.10 or newer is needed; name one with PYTHON=/path/to/python" >&2
        return 1
    fi
    if ! "$base" -m venv "$root/.venv"; then
        echo "error: $base cannot make a virtual environment (on Debian and Ubuntu:" \
            "apt install python3-venv)" >&2
        return 1
    fi
    local arguments=()
    for file in "${files[@]}"; do arguments+=(-r "$file"); done
    if ! "$PYTHON" -m pip install -qq --disable-pip-version-check \
        -c "$root/scripts/constraints.txt" "${arguments[@]}"; then
        echo "error: the installation did not finish; run this again to continue" >&2
        return 1
    fi
    # quickstart.sh and test.sh share .venv: each adds its line, so neither installs again.
    echo "$wanted" >>"$stamp"
}
