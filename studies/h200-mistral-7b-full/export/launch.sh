#!/usr/bin/env bash
# Run train.py beside this file with the interpreter in $PYTHON, or python3; options are passed on.
set -euo pipefail
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec "${PYTHON:-python3}" -- "$(dirname -- "${BASH_SOURCE[0]}")/train.py" "$@"
