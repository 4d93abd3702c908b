# Sourced by examples/quickstart.sh and .ci/run: makes `.venv` at the repository root and installs this project into it.
#
#     root=/path/of/the/repository; source "$root/tools/environment.sh"; prepare_environment cpu,test
#
# Afterwards "$venv/bin/python" has the exact versions of constraints/. A second call finds its stamp and installs
# nothing. The stamp is a hash of everything that decides what gets installed.

venv="$root/.venv"
constraints="$root/constraints/cpu-python3.11.txt"
needed_megabytes=3000  # the environment (1.6 GB) and what pip unpacks on the way
heartbeat_seconds=5

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# require_space FOLDER MEGABYTES WHAT
require_space() {
    local free
    free=$(df -Pm "$1" | awk 'NR == 2 { print $4 }')
    [[ -z $free || $free -ge $2 ]] || fail "$3 needs about $2 MB of disk space in $1, and $free MB are free"
}

# Prints the path of a Python that this project runs on.
find_python() {
    local candidate version seen=""
    for candidate in python3.11 python3 python3.12; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        # A name on the PATH may be a version manager's shim for a Python that is not there: run it.
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        if [[ $version != 3.11 && $version != 3.12 ]]; then
            seen+=" $candidate is $version;"
        elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            seen+=" $candidate ($version) lacks the modules venv and ensurepip (Debian: apt-get install python$version-venv);"
        else
            command -v "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 (or 3.12) as python3.11 or python3 on the PATH;${seen:- neither is there;} nothing was changed"
}

has_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus >/dev/null 2>&1
}

# run_with_progress LOG COMMAND...: a line with the seconds so far while the command writes to LOG; its exit code.
run_with_progress() {
    local log=$1 start=$SECONDS pid code=0 now=0 next=$heartbeat_seconds
    shift
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; exit 130' INT
    trap 'kill "$pid" 2>/dev/null; exit 143' TERM HUP
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        now=$((SECONDS - start))
        if ((now >= next)); then
            printf '  %4d s  %s\n' "$now" "$(tail -n 1 "$log" | tr -d '\r' | cut -c 1-100)"
            next=$((now + heartbeat_seconds))
        fi
    done
    wait "$pid" || code=$?
    trap - INT TERM HUP
    return "$code"
}

# explain_pip_failure LOG WHAT: the end of the log and, where it is known, what to do; ends the script.
explain_pip_failure() {
    tail -n 15 "$1" >&2
    if grep -qiE 'no space left|disk quota' "$1"; then
        fail "$2: the disk is full (whole log: $1)"
    elif grep -qiE 'name resolution|name or service not known|network is unreachable|connection refused|failed to establish|proxyerror|timed out|certificate' "$1"; then
        fail "$2: the package index cannot be reached; check the network and pip's own settings (pip config list); whole log: $1"
    fi
    fail "$2; whole log: $1"
}

# Hash of everything that decides what is installed, and where.
environment_fingerprint() {
    { cat "$root/pyproject.toml" "$root/setup.py" "$constraints"; printf '%s\n' "$root"; } | sha256sum | cut -d ' ' -f 1
}

# all_in WANTED HAVE: are all of the comma-separated words WANTED among HAVE?
all_in() {
    local word
    for word in ${1//,/ }; do
        [[ ",$2," == *",$word,"* ]] || return 1
    done
}

# pip_install WHAT ARGUMENTS...: into the environment, with progress; explains a failure and ends the script.
pip_install() {
    local what=$1
    shift
    run_with_progress "$venv/install.log" "$venv/bin/python" -m pip install --no-input --disable-pip-version-check \
        --progress-bar off --retries 2 "$@" || explain_pip_failure "$venv/install.log" "$what"
}

# prepare_environment EXTRAS
prepare_environment() {
    local extras=$1 stamp="$venv/installed" fingerprint have_fingerprint="" have_extras="" word python_command start=$SECONDS
    # Two of these at once would install over each other. The lock ends with this script, whatever happens.
    if command -v flock >/dev/null; then
        exec 9>"$root/.venv.lock"
        flock -n 9 || { echo "waiting for another installation into $venv"; flock 9; }
    fi
    fingerprint=$(environment_fingerprint)
    [[ -r $stamp ]] && read -r have_fingerprint have_extras <"$stamp"
    if "$venv/bin/python" -c '' 2>/dev/null; then
        if [[ $have_fingerprint == "$fingerprint" ]] && all_in "$extras" "$have_extras"; then
            echo "environment: $venv has everything, nothing to install"
            exec 9>&-
            return
        fi
        for word in ${have_extras//,/ }; do  # what is there stays
            all_in "$word" "$extras" || extras="$extras,$word"
        done
    else
        require_space "$root" "$needed_megabytes" "the environment"
        python_command=$(find_python)
        echo "environment: making $venv with $python_command"
        "$python_command" -m venv --clear "$venv" || fail "$python_command -m venv failed"
    fi
    rm -f "$stamp"
    echo "environment: installing grpo_megatron[$extras] with the versions of ${constraints#"$root/"} (log: $venv/install.log)"
    # Always under the constraints: anything else may swap a CPU build of torch for a CUDA build.
    pip_install "the installation failed" --constraint "$constraints" --editable "$root[$extras]"
    printf '%s %s\n' "$fingerprint" "$extras" >"$stamp"
    echo "environment: installed in $((SECONDS - start)) s"
    exec 9>&-
}
