"""The engine that generates completions for GRPO, and the measurement of a generation.

A generation is all completions that a GPU generates at once. A GiB is 2**30 bytes, and seconds are
wall time.
"""

from dataclasses import dataclass, field

COLOCATED, SERVER, TRANSFORMERS = "vllm", "vllm server", "transformers"
BATCHED_TOKENS = 4096  # the tokens that TRL lets vLLM process at once
# The environment of a process with vLLM. Its core runs in the same process, so that its calls wait
# for the device and its memory is counted. FlashInfer's sampler would compile kernels at first use.
ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The program that generates completions.

    Args:
        kind: COLOCATED (vLLM in the training process, on the same GPU), SERVER (vLLM on GPUs of its
            own) or TRANSFORMERS (the trained model generates, without an engine).
        share: the share of the GPU's memory that a colocated engine takes, vLLM's
            gpu_memory_utilization.
        sleeps: whether a colocated engine frees its weights and its cache while the model trains.
        max_tokens: the tokens at which a colocated engine stops a sequence of prompt and
            completion, or 0 if the engine has no limit, or none is known yet.
        num_gpus: the number of GPUs that share a colocated engine (tensor parallelism).
        graphs: whether vLLM compiles the model and captures CUDA graphs. TRL has no argument for
            this, so that it is always true in TRL's trainer.
    """

    kind: str = COLOCATED
    share: float = 0.3
    sleeps: bool = False
    max_tokens: int = 0
    num_gpus: int = 1
    graphs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request to measure an engine: the engine and the lengths of the completions.

    Attributes:
        engine: The engine to measure.
        prompts: The tokens of each completion's prompt.
        completions: The tokens of each completion, in the order of `prompts`.
        repeats: How often the whole generation is timed.
        alternations: How often the engine alternates with training: it sleeps, wakes up and gets
            new weights. An engine that never sleeps only gets new weights.
        has_reference: Whether the training also computes the probabilities of the untrained model,
            which is the model without its adapters.
    """

    engine: Engine
    prompts: tuple[int, ...]
    completions: tuple[int, ...]
    repeats: int = 3
    alternations: int = 10
    has_reference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasurement:
    """The measured times and the memory of an engine.

    Attributes:
        engine: The name and the version of the program, such as "vllm 0.23.0".
        start_s: The seconds of the parts of the start: `import`, `load` (the weights), `profile`
            (compilation and the search for the size of the cache), `graphs`, and `total`.
        generate_s: The seconds of each whole generation.
        half_s: The seconds to generate every second completion, as one of two GPUs does.
        tokens: The tokens of all completions of a generation.
        cached_tokens: The tokens that the cache holds, or None if the cache grows as needed.
        transfer_s: The seconds to load new weights from the same GPU, for each alternation. The
            time is empty if the trained model itself generates.
        sleep_s: The seconds to fall asleep, for each alternation.
        wake_s: The seconds to get memory for the weights and for the cache again.
        peak_gib: The peak of the engine's memory in each phase: the growth of the device's memory
            since the engine began to start. It includes the kernels that the engine loads, but no
            other part of the CUDA context.
        awake_gib: The engine's memory after each generation.
        asleep_gib: The engine's memory after each time that it fell asleep.
        weights_gib: The memory of the engine's weights, or 0 if the trained model generates.
    """

    engine: str
    start_s: dict[str, float]
    generate_s: tuple[float, ...]
    half_s: float | None = None
    tokens: int
    cached_tokens: int | None
    transfer_s: tuple[float, ...] = ()
    sleep_s: tuple[float, ...] = ()
    wake_s: tuple[float, ...] = ()
    peak_gib: dict[str, float] = field(default_factory=dict)
    awake_gib: tuple[float, ...] = ()
    asleep_gib: tuple[float, ...] = ()
    weights_gib: float = 0.0
