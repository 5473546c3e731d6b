"""A stand-in for vLLM: the calls of its interface that the engine uses, on a small model."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

__version__ = "0.0.0"


@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    logprobs: int
    ignore_eos: bool


class LLM:
    """It generates without a cache, and refuses work while it sleeps."""

    def __init__(
        self,
        *,
        model: str,
        gpu_memory_utilization: float,
        max_model_len: int,
        max_num_seqs: int,
        enable_sleep_mode: bool,
        **others: Any,
    ) -> None:
        if gpu_memory_utilization > 0.9:
            raise ValueError("Free memory is less than desired GPU memory utilization")
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        self._awake = {"weights", "kv_cache"}
        self._sleeps = enable_sleep_mode
        self._longest = max_model_len
        worker = Worker()
        worker.load_model()
        worker.determine_available_memory()
        GPUModelRunner().capture_model()
        runner = SimpleNamespace(model=self)
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(
                cache_config=SimpleNamespace(num_gpu_blocks=max_num_seqs, block_size=16)
            ),
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
        )

    def parameters(self) -> Any:
        return self._model.parameters()

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        assert "weights" in self._awake
        for name, tensor in weights:
            self._model.get_parameter(name).data.copy_(tensor)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: Any, *, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert self._awake == {"weights", "kv_cache"}
        outputs = []
        for prompt, wanted in zip(prompts, sampling_params, strict=True):
            ids = torch.tensor([prompt["prompt_token_ids"]])
            made: list[int] = []
            while len(made) < wanted.max_tokens and ids.shape[1] < self._longest:
                logits = self._model(ids).logits[0, -1]
                assert math.isfinite(float(logits.sum()))
                made.append(int(logits.argmax()))
                ids = torch.cat([ids, ids.new_tensor([[made[-1]]])], dim=1)
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=made)]))
        return outputs

    def sleep(self, level: int) -> None:
        assert self._sleeps
        assert level == 2
        self._awake.clear()

    def wake_up(self, tags: list[str]) -> None:
        self._awake.update(tags)
