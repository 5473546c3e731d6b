#!/usr/bin/env bash
# autotune study h200-mistral-7b-full: mistralai/Mistral-7B-v0.3 on h200-sxm; Configuration: full 8x1024 bf16_mixed ckpt-every_2 paged_adamw_8bit compiled, 4 micro batches a step
# Expect (measured): 3.2 s a step, 10,358 useful tokens/s, peak 85.0 GiB of 118.6 GiB; Full run: 10,000 examples, 1 epoch(s), 313 steps: 16 min 30 s (16 min 29 s to 16 min 32 s), $0.932
# Measured with transformers on NVIDIA H200, driver 580.159.04, CUDA 13.0; Fingerprint 4b243894ad88: python 3.12.3, accelerate 1.15.0, bitsandbytes 0.50.2, peft 0.21.0, torch 2.11.0, transformers 5.17.0
set -euo pipefail
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec "${PYTHON:-python3}" "$(dirname -- "${BASH_SOURCE[0]}")/train.py" "$@"
