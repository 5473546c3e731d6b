"""Engines that generate completions for GRPO: vLLM, and transformers if vLLM is not installed.

Both engines have random weights. vLLM gets the settings that TRL gives it, and runs in this
process, as in TRL's colocated mode.
"""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from autotune.core.probe_types import ProbeRequest
from autotune.core.rollout_types import BATCHED_TOKENS, COLOCATED, ENGINE_VARIABLES, TRANSFORMERS
from autotune.core.units import gib
from autotune.probe.model_settings import model_settings
from autotune.probe.synthetic_model import tokenizer
from autotune.trainer.model_builder import build, config_of

# The methods of vLLM's worker that are timed at the start, by the part of the start.
PARTS = {"load_model": "load", "determine_available_memory": "profile"}
TENSOR_STD = 0.02  # the standard deviation of the weights that the engine gets

Weights = Iterator[tuple[str, torch.Tensor]]


class Engine(Protocol):
    """An engine on the device of this process. Its methods return when the device has finished.

    `name` is the program with its version. `start_s` has the seconds of each part of the start.
    `cached_tokens` is the number of tokens that the cache holds, or None if the cache grows.
    `weights_gib` is the memory of weights that only the engine has. `shares_weights` says that the
    trained model itself generates, so that no weights are transferred.
    """

    name: str
    start_s: dict[str, float]
    cached_tokens: int | None
    weights_gib: float
    shares_weights: bool

    def generate(self, prompts: list[list[int]], lengths: Sequence[int]) -> list[int]:
        """Generate a completion of the given length to each prompt, and return all lengths."""

    def load(self, weights: Weights) -> None:
        """Replace the weights of the engine."""

    def sleep(self) -> None:
        """Free the weights and the cache."""

    def wake(self, part: str) -> None:
        """Get memory for a part again: "weights" or "kv_cache"."""


def open_engine(request: ProbeRequest, device: torch.device, scratch: str) -> Engine:
    """Start the engine of a request's generation.

    `scratch` is a folder for the model's config. Raises ImportError if the engine is vLLM and vLLM
    is not installed, and the errors of vLLM if it refuses to start.
    """
    assert request.generation is not None
    if request.generation.engine.kind == TRANSFORMERS:
        return TransformersEngine(request, device)
    return VllmEngine(request, scratch)


def refusal(request: ProbeRequest) -> str | None:
    """The reason why no engine can serve the request, or None."""
    assert request.generation is not None
    engine, config = request.generation.engine, request.config
    if engine.kind not in (COLOCATED, TRANSFORMERS):
        return f"no probe measures {engine.kind}"
    if config.quantization != "none":
        return f"no probe measures an engine whose weights are {config.quantization}"
    return None


class VllmEngine:
    """vLLM with the settings of TRL's trainer, random weights and a small tokenizer."""

    shares_weights = False

    def __init__(self, request: ProbeRequest, scratch: str) -> None:
        os.environ.update(ENGINE_VARIABLES)
        generation = request.generation
        assert generation is not None
        engine = generation.engine
        model = write_config(request.model, Path(scratch, "model"))

        begin = time.perf_counter()
        import vllm
        from vllm.v1.worker.gpu_worker import Worker

        imported = time.perf_counter()
        self.start_s = {"import": imported - begin}
        with _timed(Worker, PARTS, self.start_s), _timed_graphs(self.start_s):
            self._llm = vllm.LLM(
                model=str(model),
                load_format="dummy",
                gpu_memory_utilization=engine.share,
                max_model_len=engine.max_tokens or None,
                max_num_seqs=len(generation.prompts),
                max_num_batched_tokens=BATCHED_TOKENS,
                enable_sleep_mode=engine.sleeps,
                enforce_eager=not engine.graphs,
                logprobs_mode="processed_logprobs",
                seed=0,
            )
        self.start_s["total"] = time.perf_counter() - begin

        self.name = f"vllm {vllm.__version__}"
        cache = self._llm.llm_engine.vllm_config.cache_config
        self.cached_tokens: int | None = cache.num_gpu_blocks * cache.block_size
        self._model = self._llm.llm_engine.model_executor.driver_worker.model_runner.model
        self.weights_gib = gib(sum(one.nbytes for one in self._model.parameters()))
        self._sampling = functools.partial(
            vllm.SamplingParams,
            n=1,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            logprobs=0,
            ignore_eos=True,
        )

    def generate(self, prompts: list[list[int]], lengths: Sequence[int]) -> list[int]:
        """Generate a completion of each length; all requests go to vLLM at once."""
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            sampling_params=[self._sampling(max_tokens=length) for length in lengths],
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    def load(self, weights: Weights) -> None:
        """Load the weights one after another, as TRL does."""
        for named in weights:
            self._model.load_weights([named])
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the weights and the cache; TRL has no other level."""
        self._llm.sleep(level=2)

    def wake(self, part: str) -> None:
        """Get memory for a part again; the weights have no values yet."""
        self._llm.wake_up(tags=[part])


class TransformersEngine:
    """The model itself, which generates without another copy of its weights.

    On a GPU, transformers generates with a paged cache, in which a finished completion makes room
    for another. On a CPU, it generates all completions in one batch, up to the longest.
    """

    shares_weights = True
    cached_tokens: int | None = None
    weights_gib = 0.0

    def __init__(self, request: ProbeRequest, device: torch.device) -> None:
        begin = time.perf_counter()
        settings = model_settings(request.config, request.text_type)
        self._model = build(config_of(request.model), settings, device).eval()
        self._device = device
        self.start_s = {"total": time.perf_counter() - begin}
        self._is_paged = device.type == "cuda"
        kind = "paged" if self._is_paged else "in one batch"
        self.name = f"transformers {metadata.version('transformers')}, {kind}"

    def generate(self, prompts: list[list[int]], lengths: Sequence[int]) -> list[int]:
        """Generate a completion of each length."""
        generate = self._generate_paged if self._is_paged else self._generate_batch
        with torch.no_grad():
            return generate(prompts, lengths)

    def _config(self, longest: int, **more: Any) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0, **more
        )

    def _generate_batch(self, prompts: list[list[int]], lengths: Sequence[int]) -> list[int]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        output = self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            generation_config=self._config(max(lengths), min_new_tokens=max(lengths)),
        )
        made = output.shape[1] - longest
        return [min(made, length) for length in lengths]

    def _generate_paged(self, prompts: list[list[int]], lengths: Sequence[int]) -> list[int]:
        config = self._config(max(lengths), eos_token_id=-1)
        with self._model.continuous_batching_context_manager(generation_config=config) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=length)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            made: dict[str, int] = {}
            while len(made) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    made[result.request_id] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers stopped to generate")
        return [made[name] for name in names]

    def load(self, weights: Weights) -> None:
        """Do nothing: the trained model generates."""

    def sleep(self) -> None:
        """Do nothing: there is no memory that only the engine has."""

    def wake(self, part: str) -> None:
        """Do nothing."""


def write_config(model: dict[str, Any], folder: Path) -> Path:
    """Write a model's config and a tokenizer with a token for each row of its head.

    Returns the folder. `model` is the content of a config.json.
    """
    config = config_of(model)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tokenizer(config.get_text_config().vocab_size).save_pretrained(folder)
    return folder


def random_weights(request: ProbeRequest) -> Callable[[torch.device], Weights]:
    """A function that makes a tensor for each weight of the model, with the trainer's dtype.

    All tensors are views of one buffer on the device, so that yielding them takes no time. Adapters
    are merged into the weights before a transfer, so that they have no tensors of their own.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(request.model))
    shapes = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    largest = max(weight.numel() for weight in model.parameters())
    dtype = getattr(torch, request.config.base_dtype)

    def on(device: torch.device) -> Weights:
        buffer = torch.empty(largest, dtype=dtype, device=device).normal_(std=TENSOR_STD)
        return ((name, buffer[: math.prod(shape)].view(shape)) for name, shape in shapes)

    return on


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids of these lengths. No two prompts share their beginning."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


@contextlib.contextmanager
def _timed(owner: Any, parts: dict[str, str], seconds: dict[str, float]) -> Iterator[None]:
    """Time these methods of a class, and add their seconds to `seconds`."""
    originals = {name: getattr(owner, name) for name in parts}

    def timed(name: str) -> Callable[..., Any]:
        @functools.wraps(originals[name])
        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = originals[name](*args, **options)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            part = parts[name]
            seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - begin
            return result

        return call

    for name in parts:
        setattr(owner, name, timed(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


@contextlib.contextmanager
def _timed_graphs(seconds: dict[str, float]) -> Iterator[None]:
    """Time the capture of CUDA graphs by both of vLLM's model runners."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner

    runners = (gpu_model_runner.GPUModelRunner, model_runner.GPUModelRunner)
    with contextlib.ExitStack() as stack:
        for runner in runners:
            stack.enter_context(_timed(runner, {"capture_model": "graphs"}, seconds))
        yield
