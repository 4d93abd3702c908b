#!/usr/bin/env bash
# Everything marked gpu, on a machine with a CUDA device: bash tests/gpu/run.sh [options for pytest]
# PYTHON: interpreter with torch, megatron-core and the test extra; default: .venv of the repository, or python3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
python=${PYTHON:-$root/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
exec "$python" -m pytest -m gpu "$@"
