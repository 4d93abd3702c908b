#!/usr/bin/env bash
# Installs SGLang, the default rollout engine: bash tools/install_sglang.sh [ENVIRONMENT]
#
# ENVIRONMENT is a folder with a Python virtual environment, made where it is missing; without one it is `.venv` at the
# repository root, which the quickstart uses. Without a GPU SGLang comes without its dependencies, which are packages for
# CUDA; the extra `sglang-cpu` has what it imports there. With a GPU it is the extra `sglang`, with the torch that SGLang
# pins. A second call finds all in place and does nothing. Exit codes: 0 done, 1 failed, 2 wrong usage.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/tools/environment.sh"
if [[ $# -gt 1 || ${1:-} == -* ]]; then
    sed -n '3,7{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    [[ ${1:-} == -h || ${1:-} == --help ]] && exit 0
    exit 2
fi
if [[ $# -eq 1 ]]; then
    # Where there is no working Python the folder is cleared: never somebody's other folder.
    [[ ! -e $1 || -f $1/pyvenv.cfg || -z $(ls -A "$1" 2>&1) ]] || fail "$1 is neither empty nor a Python environment"
    mkdir -p "$1"
    venv=$(cd "$1" && pwd)
fi
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME
sglang_megabytes=1500  # without a GPU, most of it triton

# Prints the installed version of a package, nothing if there is none.
version_of() {
    "$venv/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1" 2>/dev/null || true
}

# leave_if_there PACKAGE: ends the script where SGLang and this package are in place and were imported once.
leave_if_there() {
    if command -v flock >/dev/null; then
        exec 8>"$venv/sglang.lock"
        flock 8
    fi
    if [[ $(version_of sglang) == "$wanted" && -n $(version_of "$1") && -r $checked && $(<"$checked") == "$wanted" ]]; then
        echo "sglang: $wanted is in $venv, nothing to install"
        exit
    fi
    rm -f "$checked"
}

# Can the engine's server be imported? Says why not, and ends the script.
check_import() {
    local folder=$root/grpo_megatron/rollout/sglang/cpu_kernels log=$venv/install.log
    local variables=(SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1)
    has_gpu && { variables=(OMP_NUM_THREADS=1); folder=; }
    echo "sglang: importing it once"
    run_with_progress "$log" env "${variables[@]}" "$venv/bin/python" -W ignore -c '
import sys
sys.path += sys.argv[1:]
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.model_executor.model_runner
' ${folder:+"$folder"} || { tail -n 15 "$log" >&2; fail "SGLang was installed and cannot be imported; whole log: $log"; }
}

wanted=$(sed -n 's/^sglang = \["sglang==\([^"]*\)"\]$/\1/p' "$root/pyproject.toml")
[[ -n $wanted ]] || fail "pyproject.toml has no extra sglang with a version"
checked=$venv/sglang-checked
start=$SECONDS
if has_gpu; then
    [[ -x $venv/bin/python ]] || prepare_environment cpu
    leave_if_there sglang-kernel
    echo "sglang: installing $wanted with its kernels for CUDA and the torch that it pins (log: $venv/install.log)"
    pip_install "the installation of sglang failed" --editable "$root[sglang]"
else
    # What is imported is looked at each time: pyproject.toml or the constraints may have changed.
    prepare_environment cpu,sglang-cpu
    leave_if_there sglang
    require_space "$venv" "$sglang_megabytes" "SGLang"
    echo "sglang: installing $wanted without its packages for CUDA (log: $venv/install.log)"
    pip_install "the installation of sglang failed" --no-deps "sglang==$wanted"
fi
check_import
echo "$wanted" >"$checked"
echo "sglang: $wanted installed in $((SECONDS - start)) s"
