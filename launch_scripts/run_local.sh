#!/usr/bin/env bash
# One run on this machine:
#
#     NPROC=2 bash launch_scripts/run_local.sh FILE [key.path=value ...]
#
# NPROC: number of ranks; default: one per GPU, or 1. PYTHON: interpreter; default: .venv of the repository, or python3.
# Ctrl-C or SIGTERM asks the ranks to finish their step and save (exit code 5); a second one kills them.
# Exit codes are the trainer's own: see README.md in this folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/common.sh"
check_counts

[[ $# -ge 1 && $1 != -h && $1 != --help ]] || usage "${BASH_SOURCE[0]}"
exec "$python" "$here/launch.py" --standalone --nproc-per-node "${NPROC:-$(default_ranks)}" -m "$trainer" "$@"
