#!/usr/bin/env bash
# autotune study h200-mistral-7b: mistralai/Mistral-7B-v0.3 on h200-sxm; Configuration: lora r64 16x1024 bf16_mixed ckpt-none adamw_torch_fused compiled chunked-loss, 2 micro batches a step
# Expect (measured): 1.9 s a step, 17,374 useful tokens/s, peak 92.7 GiB of 131.9 GiB; Full run: 10,000 examples, 1 epoch(s), 313 steps: 9 min 50 s (9 min 44 s to 9 min 56 s), $0.556
# Probed with transformers on NVIDIA H200, driver 580.159.04, CUDA 13.0; Fingerprint 4b243894ad88: python 3.12.3, accelerate 1.15.0, bitsandbytes 0.50.2, peft 0.21.0, torch 2.11.0, transformers 5.17.0
set -euo pipefail
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec "${PYTHON:-python3}" "$(dirname -- "${BASH_SOURCE[0]}")/train.py" "$@"
