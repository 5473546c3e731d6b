"""The requests and results of probes, which processes exchange and store as JSON.

A failed probe also has a ProbeResult. A GiB is 2**30 bytes. Seconds are wall time, or time between
events on the device. An unknown value is None.
"""

import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.core.images import Picture
from autotune.core.model_types import text_type
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.rollout_types import COLOCATED, EngineMeasurement, Generation
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig, digest_of

SCHEMA_VERSION = 1
# The version of the probe. Increase the version if probes measure something differently, so that
# stored results of earlier versions are not used.
PROBE_VERSION = 9


class Outcome(StrEnum):
    """The way a probe ended."""

    OK = "ok"
    OOM = "oom"
    # The probe was not launched, because the configuration is predicted not to fit.
    REFUSED = "refused"
    SLOW = "slow"  # the probe was stopped early, because the configuration cannot become the best
    TIMEOUT = "timeout"
    # The loss is not finite, or is exactly 0. With real weights, this outcome also means that the
    # loss differs too much from the loss of the reference probe.
    NUMERICS = "numerics"
    CRASH = "crash"


class Rung(StrEnum):
    """The purpose of a probe, which determines how much the probe measures."""

    GATE = "gate"  # a prediction from other results, without a probe
    SHALLOW = "shallow"  # a probe of a few layers, to extrapolate to all layers
    FULL = "full"  # a probe of the whole model
    CONFIRM = "confirm"  # a longer probe of one of the best configurations
    # A probe whose losses are compared with the losses of other probes with real weights
    REFERENCE = "reference"
    NODE = "node"  # compares the speed of a worker's machine with other machines


class World(StrEnum):
    """Whether the ranks (one process for each GPU) are simulated or real in a probe."""

    # One process simulates rank 0: the rank's memory and its computation, without communication. So
    # the losses are wrong.
    FAKE = "fake"
    REAL = "real"  # one process for each rank, on its own device


class Phase(StrEnum):
    """A phase of a probe, or of a training step in a probe."""

    START = "start"  # the worker starts and imports packages
    LOAD = "load"  # the model is built, and adapters are attached
    FIRST_STEP = "first_step"  # compilation and warm-up steps
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STEADY = "steady"  # all timed steps together
    EVALUATE = "evaluate"
    ROLLOUT = "rollout"  # the model generates the answers that it is trained on
    SLEEP = "sleep"  # the engine that generates frees its memory
    WAKE = "wake"  # the engine gets its memory again
    TRANSFER = "transfer"  # the engine gets the weights of the trained model
    LOG_PROBS = "log_probabilities"  # the model computes the probabilities of these answers
    UPDATE = "update"  # the passes and the optimizer steps on these answers, all together
    SAVE = "save"
    PROFILE = "profile"  # one micro batch is profiled, after all other measurements
    CLEANUP = "cleanup"


class Evidence(StrEnum):
    """The source of a number, from the most certain to the least certain."""

    MEASURED = "measured"  # on this GPU, with all layers
    EXTRAPOLATED = "extrapolated"  # on this GPU, from probes of a few layers
    PROJECTED = "projected"  # measured on another GPU and converted
    ESTIMATED = "estimated"  # by formula, without a probe
    DISTURBED = "disturbed"  # on this GPU, while other work on the machine changed the times


def weakest(*evidence: Evidence) -> Evidence:
    """Return the least certain of several sources of numbers."""
    return max(evidence, key=list(Evidence).index)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The pattern of a model's decoder layers, and the properties that limit its configurations.

    Attributes:
        num_layers: The number of decoder layers.
        prefix: The number of layers before the repeating layers.
        period: After the prefix, the kinds of layers repeat every `period` layers. `period` is None
            if the layers do not repeat.
        unquantized: The share of all parameters that quantisation does not change, because they are
            in the decoder layers but not in a linear module. The fused experts of a mixture of
            experts are an example.
        untrained: The share of all parameters that quantisation does not change and that get no
            adapter, even if adapters are on every linear layer. All other parameters in
            `unquantized` get adapters through PEFT's parametrized weights (`parametrized`).
        parametrized: Whether PEFT parametrizes weights of the model if adapters are on all linear
            layers; torch cannot compile layers with such weights.
        experts: The paths of experts' parameters inside a layer, sorted, if the experts use
            transformers' interface for experts. The adapters of such experts can be computed with
            grouped matrix products (grouped GEMM).
        plain_head: Whether the logits are neither capped nor scaled after the head.
        liger: Whether the Liger library has kernels for the model.
        sdpa: Whether transformers has SDPA attention for the model.
        flex: Whether transformers has FlexAttention for the model.
        no_adapters: The reason why PEFT refuses adapters on every linear layer, or None.
        linear_layers: The paths of linear modules inside a layer, sorted; empty if unknown.
        has_labels: Whether transformers can give the model a head over labels.
        sees_images: Whether the model can be trained on images.
        tileable: Whether the model's layers can be computed in tiles of tokens.
    """

    num_layers: int
    prefix: int
    period: int | None
    unquantized: float = 0.0
    untrained: float = 0.0
    parametrized: bool = False
    experts: tuple[str, ...] = ()
    plain_head: bool = False
    liger: bool = False
    sdpa: bool = True
    flex: bool = False
    no_adapters: str | None = None
    linear_layers: tuple[str, ...] = ()
    has_labels: bool = True
    sees_images: bool = False
    tileable: bool = True

    @property
    def single_layers(self) -> int:
        """The number of layers outside the complete periods of the layer pattern.

        Each truncated model keeps these layers.
        """
        return self.prefix + (self.num_layers - self.prefix) % (self.period or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A kind of micro batch, which represents similar micro batches of the run.

    `rows` has the lengths of the examples in each row, and each row is padded to `length` tokens.
    `share` is the share of the run's micro batches that the kind represents. A kind with share 0 is
    the longest possible micro batch. This kind determines the peak memory, and is not timed.
    `images` has the images of each row, and is empty if rows contain only text. The lengths in
    `rows` include the tokens of images.
    """

    rows: tuple[tuple[int, ...], ...]
    length: int
    share: float
    images: tuple[tuple[Picture, ...], ...] = ()

    @property
    def digest_values(self) -> tuple[Any, ...]:
        """The values of this kind of micro batch that enter a probe's digest."""
        if not self.images:
            return (self.rows, self.length, round(self.share, 6))
        images = [[(one.tokens, one.pixels) for one in row] for row in self.images]
        return (self.rows, self.length, round(self.share, 6), images)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShard:
    """One GPU's part of a mixture's experts, which `num_gpus` GPUs share out equally.

    The GPU gets the mean number of tokens or, with `fullest`, the largest possible number, as if
    every token on these GPUs had chosen this GPU's experts.
    """

    num_gpus: int
    fullest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """A request for one probe.

    Attributes:
        config: The configuration to probe.
        model: The transformers config as plain data.
        weights: A local directory with safetensors, or None for random weights.
        device: "cuda" or "cpu".
        micro_steps: The number of micro batches in each probed optimizer step, for each GPU. The
            number is 2 if the full run accumulates gradients, because the gradients of the first
            micro batch raise the memory peak of the second.
        memory_gib: The memory of the device that the run may use.
        headroom: The share of `memory_gib` that must stay free.
        rung: The purpose of the probe.
        depth: The number of layers, or None for the whole model.
        trainer: The trainer to probe.
        objective: The objective of the training run, such as SFT.
        vision: "frozen", or "trained" if a vision tower is trained too.
        world: Whether the ranks are simulated or real, if the configuration has several GPUs.
        min_timed_micros: The least number of micro batches to time, rounded up to whole steps.
        max_timed_steps: The greatest number of steps to time.
        min_timed_s: The least total time of the timed steps.
        evaluate: Whether the probe also evaluates a few micro batches and saves a checkpoint of the
            adapters, because full runs may fail in an evaluation or a save.
        seed: The seed of all random numbers.
        micro_batches: The kinds of micro batch that represent the run on each GPU. The kinds are
            ordered so that consecutive kinds differ much in length. If empty, all rows are full.
        trained_share: The share of an example's tokens that enter the loss. These tokens are at the
            end of the example.
        profile: Whether to time the kernels of one micro batch, after all other measurements. A
            whole model is not profiled, because its micro batches take long.
        new_lengths: Whether to time a few micro batches of new lengths, if the attention kernel
            makes a plan for each length (`plans_by_length`).
        flash: Whether torch's SDPA may choose FlashAttention or cuDNN. False if the card of the run
            is too old for these kernels.
        patience_s: The least time limit of a phase. A probe that exceeds a limit counts as hanging.
        generation: The generation of a GRPO run, or None. The trainer's worker trains on given
            completions, without an engine. The engine's worker generates them, without a trainer.
        experts: The part of the experts that the GPU holds, or None for all experts. Only dry
            probes can divide the experts.
    """

    config: TrainConfig
    model: dict[str, Any]
    weights: str | None = None
    device: str = "cuda"
    micro_steps: int = 2
    memory_gib: float
    headroom: float = 0.05
    rung: Rung = Rung.FULL
    depth: int | None = None
    trainer: str = "transformers"
    objective: Objective = Objective.SFT
    vision: str = "frozen"
    world: World = World.FAKE
    min_timed_micros: int = 2
    max_timed_steps: int = 40
    min_timed_s: float = 1.0
    evaluate: bool = False
    seed: int = 0
    micro_batches: tuple[MicroBatch, ...] = ()
    trained_share: float = 1.0
    profile: bool = False
    new_lengths: bool = True
    flash: bool = True
    patience_s: float = 0.0
    generation: Generation | None = None
    experts: ExpertShard | None = None

    @property
    def parallelism(self) -> Parallelism:
        """The number of GPUs in the configuration, and their strategy."""
        return Parallelism.of(self.config)

    @property
    def simulates_rank(self) -> bool:
        """Whether one process simulates one of several ranks; the probe's losses are then wrong."""
        return self.config.num_gpus > 1 and self.world is World.FAKE

    @property
    def has_real_ranks(self) -> bool:
        """Whether several processes share this training and wait for each other."""
        return self.config.num_gpus > 1 and self.world is World.REAL

    @property
    def kinds(self) -> tuple[MicroBatch, ...]:
        """The kinds of micro batch to train on; without `micro_batches`, one kind of full rows."""
        config = self.config
        full = MicroBatch(
            rows=((config.seq_len,),) * config.micro_batch_size, length=config.seq_len, share=1.0
        )
        return self.micro_batches or (full,)

    @property
    def text_type(self) -> str:
        """The type of the language model."""
        return text_type(self.model)

    @property
    def has_images(self) -> bool:
        """Whether any row has images."""
        return any(any(kind.images) for kind in self.kinds)

    @property
    def longest(self) -> MicroBatch:
        """The kind of micro batch with the longest rows, and among these with the most tokens."""
        return max(self.kinds, key=lambda kind: (kind.length, sum(map(sum, kind.rows))))

    @property
    def shares_vllm(self) -> bool:
        """Whether the run's process also holds vLLM, which switches cuDNN's attention off."""
        return self.generation is not None and self.generation.engine.kind == COLOCATED

    @property
    def plans_by_length(self) -> bool:
        """Whether torch may choose an attention kernel that makes a plan for each new length.

        Torch may choose such a kernel if the micro batches have several lengths, and the run or TRL
        makes a mask. Otherwise `trainer.patches` excludes such kernels.
        """
        masked = self.config.padding == "masked" or (
            self.trainer == "trl" and self.config.has_any_length
        )
        lengths = {kind.length for kind in self.kinds}
        return masked and not self.shares_vllm and len(lengths) > 1

    @property
    def digest(self) -> str:
        """Twelve hex digits. Requests with equal digests can use the same stored result.

        A stored result is used only if the fingerprints are equal too.
        """
        return digest_of(
            {
                "config": self.config.as_dict(),
                "model": self.model,
                # With real weights, the losses are checked. The losses depend on the weights and
                # the seed.
                "weights": self.weights is not None and [self.weights, self.seed],
                "device": self.device,
                "micro_steps": self.micro_steps,
                "memory_gib": round(self.memory_gib, 3),
                "headroom": self.headroom,
                "depth": self.depth,
                "trainer": self.trainer,
                "micro_batches": [kind.digest_values for kind in self.micro_batches],
                **({"world": self.world} if self.config.num_gpus > 1 else {}),
                **({"trained_share": self.trained_share} if self.trained_share < 1 else {}),
                **({"profile": True} if self.profile and self.depth is not None else {}),
                **({} if self.flash else {"flash": False}),
                **({} if self.vision == "frozen" else {"vision": self.vision}),
                **({} if self.objective is Objective.SFT else {"objective": self.objective}),
                # Earlier versions kept fp8 weights in 16 bits. This key makes the digests of probes
                # by those versions differ from today's digests.
                **({"kept": "fp8"} if self.config.quantization == "fp8" else {}),
                **({"generation": to_data(self.generation)} if self.generation else {}),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """The number of a process among real ranks, and the file that connects the ranks.

    `number` is the rank's number. `meeting` is the path of a file through which the ranks find each
    other; the file does not exist yet.
    """

    number: int
    meeting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The hardware and software that a measurement is valid for, compared by digest."""

    device: str
    compute_capability: str | None = None
    device_memory_gib: float
    driver: str | None = None
    cuda: str | None = None
    python: str
    packages: dict[str, str]
    allocator: str
    threads: int | None = None  # only for a CPU
    probe: int = 1  # the `PROBE_VERSION` of the probe

    @property
    def has_bf16(self) -> bool:
        """Whether a GPU computes bf16 in hardware, from compute capability 8.0 on.

        Older GPUs emulate bf16.
        """
        return float(self.compute_capability or 0) >= 8.0

    @property
    def digest(self) -> str:
        """Twelve hex digits; equal fingerprints have equal digits."""
        return digest_of(to_data(self))

    def differences(self, other: "Fingerprint") -> list[str]:
        """Return 'torch: 2.11.0 then, 2.13.0 now' for each field that differs in `other` (now)."""
        then = self._flat()
        now = other._flat()
        return [
            f"{key}: {then.get(key)} then, {now.get(key)} now"
            for key in sorted(then | now)
            if then.get(key) != now.get(key)
        ]

    def _flat(self) -> dict[str, Any]:
        data: dict[str, Any] = to_data(self)
        packages = data.pop("packages")
        return data | {f"packages.{name}": version for name, version in packages.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """One reading of a card's sensors by NVML, or the means of `num_samples` readings.

    The readings are taken during the timed steps. A value that the driver does not report is None.
    `utilization` is the share of time during which a kernel ran.
    """

    utilization: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    num_samples: int = 0

    @property
    def slowed_by(self) -> tuple[str, ...]:
        """The reasons for a low clock rate that are faults: heat or the hardware.

        A power cap is not a fault, because it is normal on small cards.
        """
        return tuple(reason for reason in self.throttle_reasons if reason != "power cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The measured rates of a device on random data. Each operation runs alone.

    `products` is the TFLOP/s of products of two square matrices, by dtype (bf16, fp16, fp32) and by
    the number of rows. `copy_gb_s` is the rate of a copy within the device's memory; bytes read and
    bytes written both count. `link_gb_s` is the rate between the host's pinned memory and the
    device, in the slower direction; it is None for a CPU. `launch_us` is the host's time for one
    small kernel, in microseconds.
    """

    products: dict[str, dict[int, float]]
    copy_gb_s: float
    link_gb_s: float | None
    launch_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRates:
    """The bus bandwidths of collectives among `num_gpus` GPUs of a host, in GB/s for each GPU.

    The collectives are FSDP2's and DDP's: FSDP2 gathers the weights of a layer and scatters the sum
    of the layer's gradients, and DDP adds up gradients in buckets.
    """

    num_gpus: int
    gather_gb_s: float
    scatter_gb_s: float
    reduce_gb_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """The times of a GPU's kernels in one profiled micro batch, by kind of work.

    `fp8_s` is the total time of matrix products in 8 bits, and `products_s` is the total time of
    matrix products in more bits. `attention_s` is the total time of fused attention, and `bytes_s`
    is the total time of all other kernels, which memory bandwidth limits. `busy_s` is the time
    during which at least one kernel ran. `micro_s` is the time of the same micro batch without
    profiling. During the rest of `micro_s`, the device waits: for the host, or between two kernels.
    """

    products_s: float
    fp8_s: float
    attention_s: float
    bytes_s: float
    busy_s: float
    micro_s: float
    num_kernels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkewedRouting:
    """The time of a micro batch if the routers of a mixture of experts load the experts unevenly.

    The hottest expert of each layer gets `hottest` times the mean number of tokens. The micro batch
    then takes `ratio` times as long as with an even load.
    """

    hottest: float
    ratio: float


# A micro batch is CPU-bound if the host needs at least this share of the micro batch's time to
# issue its kernels.
HOST_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measured times and memory peaks of one probe on one rank.

    Attributes:
        step_s: The time of each timed optimizer step, from its start to the next step's start. With
            several kinds of micro batch, it is the time of a step with average micro batches.
        micro_step_s: The time of each micro batch; if a step has only one micro batch, the time of
            the whole step. With several kinds, the values are means over all kinds, weighted by
            their shares.
        rest_s: The time of each step outside its micro batches: clipping, optimizer, logging.
        micro_steps: The number of micro batches in a step.
        phase_s: The time that a step spends in each phase.
        phase_peak_gib: The peak memory in each phase.
        segment_peak_gib: The peak memory in each segment of a step. The head and the layers are
            separate segments of the forward and the backward pass, because the peak of a deeper
            model may be in another segment.
        kind_s: The (share, seconds) of each kind of micro batch, in the order of the request.
        host_micro_s: The time that the host takes to issue a micro batch. With many layers, the
            device's queue becomes full, and the time includes the host's waiting. The time is None
            on a CPU, and if `host_waits`.
        host_share: The host's time to issue a micro batch, without waiting, as a share of the micro
            batch's time. The share is known only from truncated models, which do not fill the
            device's queue.
        host_waits: Whether the host must wait for the device within a micro batch, as with images.
        kernels: The kernel times of a micro batch, from truncated models, or None.
        time_error: The relative error of extrapolated times; 0 for measured times.
        warm_s: The time of the steps before the timed steps, without loading and compilation.
        new_length_s: The extra time of a micro batch whose length is new in the process, because
            libraries then plan their kernels; unknown if it was not measured.
        skewed: The time with skewed routing; unknown if it was not measured.
        row_length: The tokens of the longest rows, including padding.
        evaluation_s: The mean time of a micro batch in an evaluation; unknown if it was not
            measured.
        checkpoint_s: The time to write a checkpoint; unknown if it was not measured.
        model_gib: The memory of the base weights on the device.
        gradients_gib: The largest total size of one micro batch's gradients that are alive at once.
        peak_reserved_gib: The peak memory that the allocator reserves. This peak must fit under
            `limit_gib`.
        limit_gib: The memory that the run may use, minus CUDA context, headroom and managed memory.
        context_gib: The memory of the CUDA context, with kernels and libraries; unknown if the
            driver does not report it.
        managed_gib: The memory of paged optimizer state, which torch does not count.
        in_host_gib: The memory of trained weights and optimizer state that are kept in the host's
            memory.
        losses: The losses of the first micro batches.
        phase_reserved_gib: The peak memory that the allocator reserves in each phase, for GRPO.
        between_gib: The memory that the allocator reserves at the start of each generation, when
            the trained model waits for completions. Growth shows fragmentation.
        merge_s: The seconds to merge adapters into the weights and to undo this, for each transfer
            of weights to the engine. None without adapters.
        own_cores: The mean number of cores that the study used during the timed steps; unknown if
            the system does not report it.
        other_cores: The mean number of cores that processes outside the study used during the timed
            steps.
        other_gpu: The mean share of the GPU's time that processes outside the study used during the
            timed steps. The share is unknown on a CPU, and if the driver hides processes.
    """

    step_s: tuple[float, ...]
    micro_step_s: tuple[float, ...]
    rest_s: tuple[float, ...]
    micro_steps: int
    phase_s: dict[Phase, float]
    phase_peak_gib: dict[Phase, float]
    segment_peak_gib: dict[str, float] = field(default_factory=dict)
    kind_s: tuple[tuple[float, float], ...] = ()
    host_micro_s: float | None = None
    host_share: float | None = None
    host_waits: bool = False
    kernels: KernelTimes | None = None
    time_error: float = 0.0
    warm_s: float | None = None
    new_length_s: float | None = None
    skewed: SkewedRouting | None = None
    row_length: int | None = None
    evaluation_s: float | None = None
    checkpoint_s: float | None = None
    model_gib: float
    adapters_gib: float
    gradients_gib: float
    optimizer_gib: float
    peak_allocated_gib: float
    peak_reserved_gib: float
    limit_gib: float
    context_gib: float | None
    managed_gib: float = 0.0
    in_host_gib: float = 0.0
    alloc_retries: int = 0
    loss_first: float
    loss_last: float
    losses: tuple[float, ...] = ()
    trainable_params: int
    total_params: int
    phase_reserved_gib: dict[Phase, float] = field(default_factory=dict)
    between_gib: tuple[float, ...] = ()
    merge_s: float | None = None
    telemetry: Telemetry | None = None
    own_cores: float | None = None
    other_cores: float | None = None
    other_gpu: float | None = None

    @property
    def host_bound(self) -> bool:
        """Whether the step is known to be CPU-bound: its speed then depends on the host's load."""
        return (self.host_share or 0.0) >= HOST_SHARE

    @property
    def step_range(self) -> float | None:
        """The 90th minus the 10th percentile of the timed steps, as a fraction of their median.

        With a single timed step, the times of its micro batches are used. Different kinds of micro
        batch do not widen the range, because each step's time is converted to average micro
        batches. The range is None if there is only one time.
        """
        times = self.step_s if len(self.step_s) > 1 else self.micro_step_s
        if len(times) < 2:
            return None
        tenths = statistics.quantiles(times, n=10, method="inclusive")
        return (tenths[-1] - tenths[0]) / statistics.median(times)

    @property
    def checkpoint_gib(self) -> float:
        """The GiB that a rank adds to a checkpoint: its trained weights and optimizer state.

        The trained weights are the adapters or, without adapters, all weights.
        """
        return (
            (self.adapters_gib or self.model_gib)
            + self.optimizer_gib
            + self.managed_gib
            + self.in_host_gib
        )

    def terms_gib(self, peak_gib: float) -> dict[str, float]:
        """Divide a memory peak by use: weights, adapters, gradients, optimizer and activations.

        Activations are the part of the peak that the other uses do not explain.
        """
        terms = {
            "weights": self.model_gib,
            "adapters": self.adapters_gib,
            "gradients": self.gradients_gib,
            "optimizer": self.optimizer_gib,
        }
        return terms | {"activations": max(peak_gib - sum(terms.values()), 0.0)}


# Suffixes of operation names in `DryCount.flops`. In an unaligned product, rows of a matrix begin
# at addresses that fast kernels cannot load from. In wide attention, a head does not fit into
# registers.
UNALIGNED = "unaligned"
WIDE = "wide"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryCount:
    """The result of a dry probe: the memory and work of a training step without a GPU.

    `segment_peak_gib` has the same keys as the field of this name in `Measurement`. The tensors of
    the step are on torch's meta device, so the memory is computed, not measured. The memory
    excludes the CUDA context. `flops` has the floating-point operations of one micro batch in
    matrix products and attention, by operation name. A name ends in UNALIGNED or WIDE if the
    operation needs a slower kernel, because of unaligned rows or wide attention heads.
    `moved_bytes` has the bytes that operations read and write, by kind: matrix products, products
    with so few FLOPs per byte that memory bandwidth limits them, strided tensors, gathered or
    scattered rows, and all others. `operations` is the number of torch operations; each launches a
    kernel. If the GPU holds a part of the experts, `expert_gradients_gib` is the part of
    `gradients_gib` that belongs to these experts and their adapters. `reserved_gib` is the memory
    that torch's allocator reserves in segments that cannot grow, and `occupied_gib` is its part
    that cannot be given back to the driver. Both are None if the segments can grow, and in a result
    that was extrapolated from truncated models.
    """

    model_gib: float
    adapters_gib: float
    gradients_gib: float
    optimizer_gib: float
    segment_peak_gib: dict[str, float]
    peak_allocated_gib: float
    trainable_params: int
    total_params: int
    flops: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    operations: int = 0
    expert_gradients_gib: float = 0.0
    reserved_gib: float | None = None
    occupied_gib: float | None = None

    @property
    def attention_flops(self) -> float:
        """The FLOPs of attention, without the pairs of tokens that a causal mask hides.

        The counts of memory-efficient attention and of FlexAttention leave out the hidden half of
        the pairs. The counts of all other attention kernels include the hidden half, so these
        counts are halved.
        """
        return sum(
            flops if "efficient" in name or "flex" in name else flops / 2
            for name, flops in self.flops.items()
            if "attention" in name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OomDetail:
    """A failed allocation. `terms_gib` are the parts of `allocated_gib`, the memory in use."""

    phase: Phase
    requested_gib: float | None
    allocated_gib: float
    reserved_gib: float
    limit_gib: float
    terms_gib: dict[str, float] = field(default_factory=dict)

    @property
    def need_gib(self) -> float:
        """The least memory that the step needs: memory in use plus the failed allocation."""
        return max(self.allocated_gib + (self.requested_gib or 0.0), self.reserved_gib)

    @property
    def margin(self) -> float:
        """`need_gib` minus `limit_gib`, as a fraction of the limit; at least 0.001."""
        if self.limit_gib <= 0:  # the CUDA context alone exceeds the allowed memory
            return 1.0
        return max(self.need_gib / self.limit_gib - 1.0, 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The result of one probe request.

    `seconds` has the wall time of the phases load, first_step, steady and cleanup, and `total`. The
    key `turn` is the time that the probe waited for processes that compile later probes on the same
    device. `compile` is the compilation time within `total`. `disturbed` says how other work on the
    machine changed the times, or is None.
    """

    request_digest: str
    config: TrainConfig
    rung: Rung
    outcome: Outcome
    evidence: Evidence = Evidence.MEASURED
    depth: int | None = None
    phase: Phase | None = None  # the phase that failed
    reason: str | None = None  # the reason why the probe failed, in words
    disturbed: str | None = None
    oom: OomDetail | None = None
    measurement: Measurement | None = None
    engine: EngineMeasurement | None = None  # the measurement of the engine that generates
    seconds: dict[str, float] = field(default_factory=dict)
    warm: bool = False  # the worker had already served another probe
    notes: tuple[str, ...] = ()
    log: str | None = None
    started_at: str | None = None  # ISO 8601, UTC
    # host:pid:ticks of the process that requested the probe; earlier versions did not store it
    node: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def is_prediction(self) -> bool:
        """Whether the result is predicted from truncated models, and no whole model was timed."""
        is_decision = self.depth is None and self.rung is Rung.SHALLOW
        return is_decision or self.evidence is Evidence.EXTRAPOLATED
