# Sourced by the launch scripts: which interpreter, which module, how many ranks.

repository=$(dirname "$here")
trainer=${TRAINER:-grpo_megatron.train}  # another module only in tests of the launchers
python=${PYTHON:-$repository/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3

# usage SCRIPT: the comment at its head.
usage() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$1" >&2
    exit 2
}

# One rank per GPU, or one.
default_ranks() {
    local gpus=0
    command -v nvidia-smi >/dev/null && gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || true
    echo $((gpus > 0 ? gpus : 1))
}

# check_counts: numbers of ranks and machines are numbers.
check_counts() {
    local name
    for name in NPROC NNODES; do
        [[ -z ${!name:-} || ${!name} =~ ^[1-9][0-9]*$ ]] || { echo "error: $name=${!name} is not a number above 0" >&2; exit 2; }
    done
}
