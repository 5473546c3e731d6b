"""The requests and results of probes: values that cross the process boundary and are stored in the database as JSON.

A failed probe has a ProbeResult too. GiB is 2**30 bytes, seconds are wall or device-event seconds, None is unknown.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.core.images import Picture
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig, digest_of

SCHEMA_VERSION = 1
PROBE_VERSION = 9  # raised when probes measure something else than before; stored results are then measured again


class Outcome(StrEnum):
    """How a probe ended."""

    OK = "ok"
    OOM = "oom"
    REFUSED = "refused"  # predicted not to fit, nothing was launched
    SLOW = "slow"  # pruned: cannot become the best
    TIMEOUT = "timeout"
    NUMERICS = (
        "numerics"  # loss not finite, exactly 0, or with real weights too far from the reference's
    )
    CRASH = "crash"


class Rung(StrEnum):
    """How much a probe measures, and for what."""

    GATE = "gate"
    SHALLOW = "shallow"
    FULL = "full"
    CONFIRM = "confirm"
    REFERENCE = "reference"  # gives the losses that others are compared with
    NODE = "node"  # only compares a worker's node with the others


class World(StrEnum):
    """How a probe on several GPUs comes by its ranks, the processes that share out a training."""

    FAKE = "fake"  # one process plays rank 0: memory and computation of a rank, no communication, and wrong losses
    REAL = "real"  # a process for each, on a device of its own


class Phase(StrEnum):
    """The part of a probe in which something happened."""

    START = "start"  # worker start, imports
    LOAD = "load"  # build the model, attach adapters
    FIRST_STEP = "first_step"  # warm-up steps, compilation
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STEADY = "steady"  # timed steps as a whole
    EVALUATE = "evaluate"
    SAVE = "save"
    PROFILE = "profile"  # of one micro batch, once everything else was measured
    CLEANUP = "cleanup"


class Evidence(StrEnum):
    """How a number is known, the most certain first."""

    MEASURED = "measured"  # this GPU, full depth
    EXTRAPOLATED = "extrapolated"  # this GPU, truncated depth
    PROJECTED = "projected"  # another GPU
    ESTIMATED = "estimated"  # a formula


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """How a model's decoder layers repeat: `prefix` different layers, then the same `period` layers over and over.

    `period` is None where nothing repeats. `unquantized` is the share of all parameters that are in the layers but in
    no linear module, such as the fused experts of a mixture: quantisation does not touch them. `untrained` is the part
    of it that adapters on every linear layer leave out; PEFT reaches the rest through `parametrized` weights, which
    cannot be compiled. `plain_head` says that the logits are neither capped nor scaled after the head, `liger` that
    Liger has kernels for the model, `sdpa` that transformers has SDPA attention for it. `no_adapters` is why PEFT
    refuses adapters on every linear layer. `linear_layers` are the paths of linear modules inside a layer, sorted;
    empty where they are not known. `has_labels` says that transformers can give it a head over labels, `sees_images`
    that it has a vision tower, `tileable` that its layers can be computed in tiles of tokens.
    """

    num_layers: int
    prefix: int
    period: int | None
    unquantized: float = 0.0
    untrained: float = 0.0
    parametrized: bool = False
    plain_head: bool = False
    liger: bool = False
    sdpa: bool = True
    no_adapters: str | None = None
    linear_layers: tuple[str, ...] = ()
    has_labels: bool = True
    sees_images: bool = False
    tileable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A kind of micro batch of the run: the lengths of the examples in each of its rows, and what these are padded to.

    `length` is in tokens, and `share` the kind's share of the run's micro batches. A kind with a share of 0 is not
    timed: it is the longest that can occur, which sets the peak of the memory. `images` has those of each row, whose
    lengths count them; it is empty where rows have text alone.
    """

    rows: tuple[tuple[int, ...], ...]
    length: int
    share: float
    images: tuple[tuple[Picture, ...], ...] = ()

    @property
    def digested(self) -> tuple[Any, ...]:
        """What a probe's digest says of it."""
        images = (
            ([[(one.tokens, one.pixels) for one in row] for row in self.images],)
            if self.images
            else ()
        )
        return (self.rows, self.length, round(self.share, 6), *images)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """One probe.

    `model` is the transformers config as plain data; `weights` a local directory with safetensors, or None for random
    weights. `micro_steps` is the number of micro batches in each probed optimizer step (2 whenever the full run
    accumulates at all, since gradients that stay alive raise the second one's peak). Whole steps are timed, for at
    least `min_timed_s` and `min_timed_micros` micro batches; with `evaluate` a few micro batches are evaluated and a
    checkpoint of the adapters is saved, since full runs die there. `memory_gib` is the memory that the run may use,
    `headroom` the share of it that must stay free. `depth` is None for the whole model. `micro_batches` are the kinds
    of micro batch that stand for those of the run, in an order in which neighbours differ much; without them all rows
    are full. `trained_share` of the tokens are trained on, those at the end of each example. With `profile` the kernels
    of one micro batch are timed once everything else was; not of a whole model, whose micro batches take long. With
    `new_lengths` a few micro batches of new lengths are timed, where attention plans for each. Without `flash`, torch's
    own attention has neither FlashAttention nor cuDNN to choose from: the card of the run is too old for them.
    `micro_steps` and micro batches are those of each GPU, where the configuration has several; `world` says who their
    ranks are. No phase is taken to hang before `patience_s`. `vision` is frozen or trained: whether a vision tower is
    trained too.
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

    @property
    def parallelism(self) -> Parallelism:
        """How the GPUs of the configuration share out its training."""
        return Parallelism.of(self.config)

    @property
    def simulates_rank(self) -> bool:
        """Whether one process simulates a rank of several, so its losses have no meaning."""
        return self.config.num_gpus > 1 and self.world is World.FAKE

    @property
    def has_real_ranks(self) -> bool:
        """Whether several processes share out this training, which wait for each other."""
        return self.config.num_gpus > 1 and self.world is World.REAL

    @property
    def kinds(self) -> tuple[MicroBatch, ...]:
        """The kinds of micro batch to train on; a single one, of full rows, where none were named."""
        config = self.config
        full = MicroBatch(
            rows=((config.seq_len,),) * config.micro_batch_size, length=config.seq_len, share=1.0
        )
        return self.micro_batches or (full,)

    @property
    def longest(self) -> MicroBatch:
        """The kind with the longest rows."""
        return max(self.kinds, key=lambda kind: kind.length)

    @property
    def plans_by_length(self) -> bool:
        """Whether torch may choose an attention that plans for each length of a micro batch, of which the run has many.

        Where there is a mask, or TRL makes one. Elsewhere such attention is left out (`runtime.patches`).
        """
        masked = self.config.padding == "masked" or (
            self.trainer == "trl" and self.config.has_any_length
        )
        return masked and len({kind.length for kind in self.kinds}) > 1

    @property
    def digest(self) -> str:
        """What must be equal for a stored result to answer this request on the same fingerprint."""
        return digest_of(
            {
                "config": self.config.as_dict(),
                "model": self.model,
                # With real weights the losses are checked, and they depend on both.
                "weights": self.weights is not None and [self.weights, self.seed],
                "device": self.device,
                "micro_steps": self.micro_steps,
                "memory_gib": round(self.memory_gib, 3),
                "headroom": self.headroom,
                "depth": self.depth,
                "trainer": self.trainer,
                "micro_batches": [kind.digested for kind in self.micro_batches],
                **({"world": self.world} if self.config.num_gpus > 1 else {}),
                **({"trained_share": self.trained_share} if self.trained_share < 1 else {}),
                **({"profile": True} if self.profile and self.depth is not None else {}),
                **({} if self.flash else {"flash": False}),
                **({} if self.vision == "frozen" else {"vision": self.vision}),
                **({} if self.objective is Objective.SFT else {"objective": self.objective}),
                **(
                    {"kept": "fp8"} if self.config.quantization == "fp8" else {}
                ),  # earlier probes kept 16 bits
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """The address of a process among real ranks.

    It has the rank's number, and the path of a file that does not exist yet, where the ranks meet.
    """

    number: int
    meeting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The hardware and software that a measurement holds for, compared by digest."""

    device: str
    compute_capability: str | None = None
    device_memory_gib: float
    driver: str | None = None
    cuda: str | None = None
    python: str
    packages: dict[str, str]
    allocator: str
    threads: int | None = None  # CPU only
    probe: int = 1  # `PROBE_VERSION` of what measured

    @property
    def has_bf16(self) -> bool:
        """Whether a GPU computes bf16 in hardware, from compute capability 8.0 on; older ones emulate it."""
        return float(self.compute_capability or 0) >= 8.0

    @property
    def digest(self) -> str:
        """Twelve hex digits, equal for equal fingerprints."""
        return digest_of(to_data(self))

    def differences(self, other: "Fingerprint") -> list[str]:
        """'torch: 2.11.0 then, 2.13.0 now' for each field in which `other` (now) differs from this one (then)."""
        then, now = self._flat(), other._flat()
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
    """One reading of a card's sensors by NVML, or means over the `num_samples` readings during the timed steps.

    None where the driver does not report a value. `utilization` is the share of time in which a kernel ran.
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
        """The reasons that are a fault: heat or the hardware. A power cap is normal on small cards."""
        return tuple(reason for reason in self.throttle_reasons if reason != "power cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What a device reaches when it does one thing at a time, on random data.

    `products` are TFLOP/s of products of square matrices, by dtype (bf16, fp16, fp32) and side. `copy_gb_s` counts what
    a copy within the device's memory reads and what it writes; `link_gb_s` is the slower direction between the host's
    pinned memory and the device, None on a CPU. `launch_us` are microseconds of the host for one small kernel.
    """

    products: dict[str, dict[int, float]]
    copy_gb_s: float
    link_gb_s: float | None
    launch_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRates:
    """What `num_gpus` of a host reach together, as bus bandwidths in GB/s: bytes on the wire of each GPU per second.

    FSDP2 gathers the weights of a layer, and scatters the sum of its gradients; DDP adds up gradients in buckets.
    """

    num_gpus: int
    gather_gb_s: float
    scatter_gb_s: float
    reduce_gb_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Seconds of a GPU's kernels in one micro batch by what they do, from a profile.

    They multiply matrices, with factors of 8 bits (`fp8_s`) or more (`products_s`), compute fused attention, or move
    bytes. `busy_s` is the time in which any kernel ran, and `micro_s` what the same micro batch takes when it is not
    profiled: the device waits for the host, or between two kernels, for the rest.
    """

    products_s: float
    fp8_s: float
    attention_s: float
    bytes_s: float
    busy_s: float
    micro_s: float
    num_kernels: int


# The host sets the pace if issuing a micro batch takes it at least this share of the time of a micro batch.
HOST_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Raw times and peaks of one probe on one rank.

    `step_s` is start to start of whole probed optimizer steps; `micro_step_s` of each of their micro batches (the whole
    step where there is a single one); `rest_s` what each step takes beyond its micro batches: clipping, optimizer,
    logging. Where the run has several kinds of micro batch, `micro_step_s` are means over all kinds by their shares,
    `step_s` what steps of such micro batches take, and `kind_s` pairs of each kind's share and its own seconds, in the
    order of the request.
    `phase_s` and `phase_peak_gib` are keyed by Phase; `segment_peak_gib` is finer: it divides both passes where their
    peaks may move as depth grows. `host_micro_s` is what the host takes to issue a micro batch; with many layers the
    device's queue fills, and it includes waiting. It is None where that is not known: on a CPU, and
    where the host waits for the device within a micro batch (`host_waits`), as it does with images.
    So `host_share`, the share of a micro batch's time that the host needs itself, comes from truncated models, as do
    `kernels`; None where there are none. `time_error` is the relative error that extrapolated times may have, 0 where
    they were measured. `new_length_s` is how much longer a micro batch takes if its length is new to the process, since
    libraries then make a plan; `evaluation_s` is the mean time of a micro batch that is only evaluated; `checkpoint_s`
    is what writing a checkpoint takes. They are None where that was not tried.
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
    warm_s: float | None = (
        None  # what the steps before the timed ones take where nothing has to be loaded or compiled
    )
    new_length_s: float | None = None
    row_length: int | None = None  # tokens of the longest rows, padding included
    evaluation_s: float | None = None
    checkpoint_s: float | None = None
    model_gib: float  # resident base weights
    adapters_gib: float
    gradients_gib: float  # of one micro batch, as far as they are alive at once
    optimizer_gib: float
    peak_allocated_gib: float
    peak_reserved_gib: float  # what must fit under limit_gib
    limit_gib: float  # usable memory less context, headroom and managed memory
    context_gib: (
        float | None
    )  # CUDA context, kernels, libraries; None where the driver does not show it
    managed_gib: float = 0.0  # paged optimizer state, which torch does not count
    in_host_gib: float = 0.0  # what is trained and its optimizer state, where all that lasts waits in the host's memory
    alloc_retries: int = 0
    loss_first: float
    loss_last: float
    losses: tuple[float, ...] = ()  # of the first micro batches
    trainable_params: int
    total_params: int
    telemetry: Telemetry | None = None

    @property
    def host_bound(self) -> bool:
        """Whether the host is known to set the pace: speed then depends on what else runs on it."""
        return (self.host_share or 0.0) >= HOST_SHARE

    @property
    def checkpoint_gib(self) -> float:
        """The size of a rank's share of a checkpoint: what is trained, adapters or all weights, and optimizer state."""
        return (
            (self.adapters_gib or self.model_gib)
            + self.optimizer_gib
            + self.managed_gib
            + self.in_host_gib
        )

    def terms_gib(self, peak_gib: float) -> dict[str, float]:
        """What a peak consists of: weights, adapters, gradients, optimizer state; activations are the rest."""
        terms = {
            "weights": self.model_gib,
            "adapters": self.adapters_gib,
            "gradients": self.gradients_gib,
            "optimizer": self.optimizer_gib,
        }
        return terms | {"activations": max(peak_gib - sum(terms.values()), 0.0)}


# Ends of the names of products whose rows begin nowhere that quick kernels could load from, and of attention of wide
# heads, which no registers hold.
UNALIGNED, WIDE = "unaligned", "wide"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryCount:
    """What a training step on the meta device was counted to hold, at one depth, without the CUDA context.

    The peaks have the keys of `Measurement`. `flops` is the arithmetic of products of matrices in one micro batch, by
    operation, of which some are UNALIGNED or WIDE; `moved_bytes` what its operations read and write, by kind: products
    of matrices, thin ones whose time is that of their bytes, strided tensors, rows that are gathered or scattered, and
    all others; `operations` is their number, of which each is a kernel.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OomDetail:
    """Where memory ran out and what held it then. `terms_gib` names the parts, which sum to `allocated_gib`."""

    phase: Phase
    requested_gib: float | None
    allocated_gib: float
    reserved_gib: float
    limit_gib: float
    terms_gib: dict[str, float] = field(default_factory=dict)

    @property
    def need_gib(self) -> float:
        """What was needed at least: the request that failed is part of it."""
        return max(self.allocated_gib + (self.requested_gib or 0.0), self.reserved_gib)

    @property
    def margin(self) -> float:
        """Need / limit - 1, always positive."""
        if self.limit_gib <= 0:  # the context alone is more than what was allowed
            return 1.0
        return max(self.need_gib / self.limit_gib - 1.0, 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The answer to one request.

    `seconds` says where its wall time went: load, first_step, steady, cleanup, total; `turn` is the wait for others
    that compile ahead on the same device. Of all that, `compile` is what the worker compiled for.
    """

    request_digest: str
    config: TrainConfig
    rung: Rung
    outcome: Outcome
    evidence: Evidence = Evidence.MEASURED
    depth: int | None = None
    phase: Phase | None = None  # where it failed
    reason: str | None = None  # why it failed, in words
    oom: OomDetail | None = None
    measurement: Measurement | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    warm: bool = False  # the worker had already served a probe
    notes: tuple[str, ...] = ()
    log: str | None = None
    started_at: str | None = None  # ISO 8601, UTC
    node: str | None = (
        None  # host:pid:ticks of the process that asked for it; None of results of earlier versions
    )
    schema_version: int = SCHEMA_VERSION
