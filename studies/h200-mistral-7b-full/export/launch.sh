#!/usr/bin/env bash
# autotune study h200-mistral-7b-full: mistralai/Mistral-7B-v0.3 on h200-sxm; Configuration: full 2x1024 bf16_mixed ckpt-none adamw_torch_fused compiled, 16 micro batches a step
# Expect (measured): 3.1 s a step, 10,676 useful tokens/s, peak 131.3 GiB of 132.1 GiB; Full run: 10,000 examples, 1 epoch(s), 313 steps: 16 min 1 s (15 min 56 s to 16 min 4 s), $0.905
# Probed with transformers on NVIDIA H200, driver 580.159.04, CUDA 13.0; Fingerprint 85cb2340ae10: python 3.12.3, accelerate 1.15.0, peft 0.21.0, torch 2.11.0, transformers 5.17.0
set -euo pipefail
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec "${PYTHON:-python3}" "$(dirname -- "${BASH_SOURCE[0]}")/train.py" "$@"
