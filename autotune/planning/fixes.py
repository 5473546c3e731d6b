"""Finds changes to a run's file for TRL, Axolotl or LLaMA-Factory that make the run fit a GPU."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.files import load_data
from autotune.core.parallelism import FSDP2
from autotune.export.keys import key_of
from autotune.planning.foreign_config import adapt_to_model, parse
from autotune.planning.foreign_sharding import shard_run, synced
from autotune.planning.rollout_checks import engine_edits, with_prompts
from autotune.planning.run_estimate import CheckContext, bounds_of, check_run
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.report.values.check import (
    FP32_BASE,
    SWIFT,
    TRANSFORMERS,
    CheckedRun,
    Edits,
    ForeignConfig,
)

MAX_MICRO_BATCH = 1024  # the largest micro batch that the search tries
STEPS_KEY = "steps_per_generation"  # TRL's key for the micro batches between two generations
MIN_LENGTH = 256  # the shortest sequence length that the search tries, in tokens
# Keys whose value is a mapping of further keys. If such a mapping contains a key that is to be
# changed, the key is changed there, not at the file's top level.
NESTED = ("model_init_kwargs", "bnb_config_kwargs")
LIGER = "axolotl.integrations.liger.LigerPlugin"
LIGER_LAYERS = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
CUT_CROSS_ENTROPY = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
# The rank of a change says how much it alters the training's result. In ascending order:
# - SAME_RESULT leaves the result as it is.
# - OTHER_OPTIMIZER changes the optimizer, or switches DoRA off.
# - QUANTIZED quantises the base model, or drops the fp32 master weights.
# - SHORTER truncates the sequences to a smaller length.
# - ADAPTERS trains adapters instead of all parameters.
SAME_RESULT, OTHER_OPTIMIZER, QUANTIZED, SHORTER, ADAPTERS = range(5)

Fix = tuple[int, Edits]  # the rank of a change, and the keys to write with their values


def apply_edits(values: dict[str, Any], edits: Edits) -> dict[str, Any]:
    """Return the file's values after the edits.

    If the file has an edited key inside a mapping whose name is in NESTED, the key is changed
    there.
    """
    new = dict(values)
    for key, value in edits.items():
        inner = next((name for name in NESTED if key in (values.get(name) or ())), None)
        if inner is None:
            new[key] = value
        else:
            new[inner] = new[inner] | {key: value}
    return new


def fixes_of(run: ForeignConfig, *, has_experts: bool = False) -> Iterator[Fix]:
    """Yield each change that may save memory, except smaller micro batches and shorter sequences.

    `has_experts` says whether the model is a mixture of experts.
    """
    config = run.config
    tool = run.format
    values = run.values
    table: dict[str, Edits] = load_data("autotune.planning", "foreign_keys")["fixes"][tool]

    # Changes for every method
    if FP32_BASE in run.notes:
        yield SAME_RESULT, {"dtype": "bfloat16"}
    fused = fused_loss(values) if tool == "axolotl" else table.get("loss")
    if run.tool in (TRANSFORMERS, SWIFT):
        fused = {"use_liger_kernel": True}
    if config.loss == "full" and fused:
        yield SAME_RESULT, fused
    if size := _smaller_evaluation(run):
        yield SAME_RESULT, {key_of(tool, "eval_batch"): size}
    if config.checkpointing == "none":
        newer_key = tool == "trl" and "activation_checkpointing" in values
        edits: Edits = {"activation_checkpointing": True} if newer_key else table["checkpointing"]
        yield SAME_RESULT, edits
    if config.sharding in FSDP2 and run.accumulation > 1 and not config.sync_each_batch:
        yield SAME_RESULT, synced(values)
    if config.optimizer in ("adamw_torch", "adamw_torch_fused") and "optimizer" in table:
        yield OTHER_OPTIMIZER, table["optimizer"]
    if config.dora:
        yield OTHER_OPTIMIZER, {key_of(tool, "dora"): False}

    # Changes for adapters
    quantization = _switch_off(table["quantized"], values, "load_in_8bit")
    if config.method == "lora":
        if config.quantization != "nf4":
            yield QUANTIZED, quantization
        elif has_experts and tool == "axolotl" and not config.quantize_experts:
            yield QUANTIZED, {"quantize_moe_experts": True}
    else:
        yield from _fixes_of_full(run, table, quantization)


def _fixes_of_full(
    run: ForeignConfig, table: dict[str, Edits], quantization: Edits
) -> Iterator[Fix]:
    """Yield the changes for full fine-tuning; `quantization` are the edits for a 4-bit base."""
    if run.config.precision != "bf16_pure" and "pure" in table:
        yield QUANTIZED, table["pure"]
    adapters = table["adapters"]
    if run.format == "axolotl":
        adapters = adapters | {"lora_r": run.values.get("lora_r") or 16}
    yield ADAPTERS, adapters
    yield ADAPTERS, adapters | quantization


def _smaller_evaluation(run: ForeignConfig) -> int | None:
    """Return a smaller evaluation batch that saves memory, or None if the batch is small already.

    If training and evaluation use the same loss kernel, the result is the micro batch size of the
    training. Otherwise the result is 1.
    """
    evaluation = run.evaluation
    if evaluation is None:
        return None
    size = run.config.micro_batch_size if evaluation.loss == run.config.loss else 1
    return size if (evaluation.rows or run.config.micro_batch_size) > size else None


def fused_loss(values: dict[str, Any], *, fuses: bool = True) -> Edits:
    """Return the edits that make Axolotl fuse the loss with the output head, or no longer do so.

    If the file lists Liger's plugin, the edits switch on Liger's fused loss, otherwise Cut Cross
    Entropy.
    """
    plugins = _plugins(values)
    cuts = any("cut_cross_entropy" in name.lower() for name in plugins)
    if not fuses:
        both = {"liger_fused_linear_cross_entropy": False, "cut_cross_entropy": False}
        return {key: off for key, off in both.items() if values.get(key) or ("cut" in key and cuts)}

    if any("liger" in name.lower() for name in plugins):
        return _switch_off(
            {"liger_fused_linear_cross_entropy": True}, values, "liger_cross_entropy"
        )
    added = [] if cuts else [CUT_CROSS_ENTROPY]
    return {"plugins": plugins + added, "cut_cross_entropy": True}


def liger_layers(values: dict[str, Any], *, on: bool) -> Edits:
    """Return the edits that switch Liger's kernels for layers on or off in a file of Axolotl."""
    plugins = _plugins(values)
    layers = dict.fromkeys(LIGER_LAYERS, on)
    if not on:
        return {key: False for key in layers if values.get(key)}
    has_plugin = any("liger" in name.lower() for name in plugins)
    return ({} if has_plugin else {"plugins": [*plugins, LIGER]}) | layers


def _plugins(values: dict[str, Any]) -> list[str]:
    plugins = values.get("plugins") or []
    names = plugins.split(",") if isinstance(plugins, str) else plugins
    return [str(name).strip() for name in names]


def _switch_off(edits: Edits, values: dict[str, Any], key: str) -> Edits:
    return edits | ({key: False} if values.get(key) else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class FixSearch:
    """Tries changes to a run that may not fit.

    `parsed` caches the parsed file for each set of edits.
    """

    context: CheckContext
    checked: CheckedRun
    parsed: dict[str, ForeignConfig | None] = field(default_factory=dict)

    def each_alone(self) -> list[CheckedRun]:
        """Return one changed run for each single change that saves memory or makes the run fit.

        The result has only the largest smaller micro batch that fits, and only the longest shorter
        sequence length that fits.
        """
        run = self.checked.run
        edited_runs = [(edits, self._parse(edits)) for _, edits in self._fixes()]
        results = [self._fixed(edits, new) for edits, new in edited_runs if new is not None]

        if sizes := self._smaller_batches(run):
            results.append(self._largest({}, {}, (FITS,)) or self._fixed({}, run, sizes[-1]))

        if lengths := self._shorter_lengths(run):
            shorter_runs = [self._fixed({}, run, length) for length in lengths]
            fitting = (one for one in shorter_runs if one and one.state == FITS)
            results.append(next(fitting, shorter_runs[0]))

        changes = [fixed for fixed in results if fixed and fixed.edits]
        return [fixed for fixed in changes if self.saved_gib(fixed) > 0.005 or fixed.state == FITS]

    def _fixes(self) -> list[Fix]:
        run = self.checked.run
        of_engine = engine_edits(self.context.model, run, self.context.card_gib)
        return [(SAME_RESULT, edits) for edits in of_engine] + list(
            fixes_of(run, has_experts=self.context.model.has_experts)
        )

    def saved_gib(self, fixed: CheckedRun) -> float:
        """Return the GiB that the changed run `fixed` saves compared with the original run."""
        return self.checked.estimate.need_gib - fixed.estimate.need_gib

    def best(self) -> CheckedRun | None:
        """Return the best set of changes that makes the run fit, or None.

        The best set changes the training's result the least; ties go to the fewest changes, then to
        the fastest run. If the run is out of memory and no set certainly makes it fit, the result
        is a set that may make it fit: the memory need then differs from the limit by less than the
        formula's error.
        """
        fixes = self._fixes()
        for accepted in ((FITS,), (TIGHT,)) if self.checked.state == OOM else ((FITS,),):
            for rank in range(ADAPTERS + 1):
                for length in self._lengths_for(rank):
                    if (best := self._best_subset(fixes, rank, length, accepted)) is not None:
                        return best
        return None

    def _lengths_for(self, rank: int) -> list[Edits]:
        """Return the sequence lengths to try with changes of a rank.

        Changes of a rank below SHORTER keep the run's length. With SHORTER, only shorter lengths
        are tried. With ADAPTERS, the run's length and shorter lengths are tried.
        """
        unchanged: list[Edits] = [] if rank == SHORTER else [{}]
        return unchanged + (self._shorter_lengths(self.checked.run) if rank >= SHORTER else [])

    def _best_subset(
        self, fixes: list[Fix], rank: int, length: Edits, accepted: Sequence[str]
    ) -> CheckedRun | None:
        """Return the run that fits with the fewest changes of this rank, or None if no run fits.

        A run fits if its state is FITS or in `accepted`. `length` is the edit that shortens the
        sequences, or {} to keep their length. Of two runs with equally many changes, the faster run
        wins.
        """
        results = []
        for place, (count, edits) in enumerate(_subsets(fixes, rank)):
            fixed = self._largest(edits, length, accepted)
            if fixed is not None and fixed.edits:
                resized = len(fixed.edits) > len(edits)
                speed = fixed.estimate.tokens_per_s or 0.0
                results.append((count + resized, -speed, place, fixed))

        return min(results)[-1] if results else None

    def _largest(self, edits: Edits, length: Edits, accepted: Sequence[str]) -> CheckedRun | None:
        """Return the edited run with the largest micro batch that fits.

        A run fits if its state is FITS or in `accepted`. The global batch stays the same. Returns
        None if no micro batch fits.
        """
        run = self._parse(edits)
        if run is None:
            return None
        sizes = [length, *(length | size for size in self._smaller_batches(run))]

        def fits(size: Edits) -> bool:
            bounds = bounds_of(self.context, self._resize(run, size))
            state = OOM if bounds is None else bounds.state(self.context.limit_gib)
            return state == FITS or state in accepted

        if not fits(sizes[-1]):  # the smallest micro batch needs the least memory
            return None
        return self._fixed(edits, run, sizes[bisect_left(sizes, True, key=fits)])

    def _parse(self, edits: Edits) -> ForeignConfig | None:
        """Apply the edits to the file, and parse it for the run's number of GPUs.

        Returns None if the tool would refuse the edited file, or if the run is unsupported.
        """
        run = self.checked.run
        key = repr(edits)

        if not edits:
            return run
        if key not in self.parsed:
            try:
                edited_run = adapt_to_model(
                    parse(apply_edits(run.values, edits), run.format), self.context.model
                )
                shares = run.uncounted is not None and run.uncounted.shared
                num_gpus = run.num_gpus if shares or run.config.num_gpus > 1 else None
                edited_run = with_prompts(edited_run, self.context.workload.lengths)
                self.parsed[key] = shard_run(edited_run, self.context.model, num_gpus)
            except UsageError:
                self.parsed[key] = None
        return self.parsed[key]

    def _fixed(
        self, edits: Edits, run: ForeignConfig, size: Edits | None = None
    ) -> CheckedRun | None:
        return check_run(self.context, self._resize(run, size or {}), edits | (size or {}))

    def _resize(self, run: ForeignConfig, size: Edits) -> ForeignConfig:
        rows = run.config.micro_batch_size * run.accumulation
        micro = size.get(key_of(run.format, "micro_batch_size"), run.config.micro_batch_size)
        seq_len = size.get(self._length_key, run.config.seq_len)
        rollouts = run.rollouts
        if rollouts is not None:
            tokens = size.get(self._length_key, rollouts.completion_tokens)
            rollouts = replace(rollouts, completion_tokens=tokens)
            seq_len = rollouts.longest
        config = replace(run.config, micro_batch_size=micro, seq_len=seq_len)
        return replace(run, config=config, accumulation=rows // micro, rollouts=rollouts)

    def _smaller_batches(self, run: ForeignConfig) -> list[Edits]:
        """Return edits for each smaller micro batch that divides a step's rows, largest first."""
        micro = run.config.micro_batch_size
        rows = micro * run.accumulation
        sizes = [size for size in range(min(micro - 1, MAX_MICRO_BATCH), 0, -1) if rows % size == 0]
        batch_key = key_of(run.format, "micro_batch_size")
        # In Axolotl, the older key `batch_size` sets the number of rows in a step. Axolotl refuses
        # a file that also has the key for gradient accumulation.
        if run.values.get("batch_size") is not None:
            return [{batch_key: size} for size in sizes]
        accumulation_key = key_of(run.format, "accumulation")
        edits = [{batch_key: size, accumulation_key: rows // size} for size in sizes]
        if run.rollouts is not None and run.values.get(STEPS_KEY) is not None:
            # This key counts micro batches.
            return [edit | {STEPS_KEY: run.rollouts.sequences // edit[batch_key]} for edit in edits]
        return edits

    def _shorter_lengths(self, run: ForeignConfig) -> list[Edits]:
        """Return shorter sequence lengths: powers of two, the longest first."""
        longest = run.rollouts.completion_tokens if run.rollouts else run.config.seq_len
        powers = range((longest - 1).bit_length() - 1, MIN_LENGTH.bit_length() - 2, -1)
        return [{self._length_key: 2**power} for power in powers]

    @property
    def _length_key(self) -> str:
        run = self.checked.run
        if run.rollouts is not None:
            return "max_completion_length"
        key = key_of(run.format, "seq_len")
        return "max_seq_length" if key not in run.values and "max_seq_length" in run.values else key


def _subsets(fixes: list[Fix], rank: int) -> Iterator[tuple[int, Edits]]:
    """Yield each combination of changes with this rank, as (number of changes, merged edits).

    The rank of a combination is the largest rank of its changes. For the rank SHORTER, all
    combinations of lower ranks are yielded, because the caller itself adds the shorter sequence
    length. For SAME_RESULT, the combination without changes is also yielded. At most one change of
    a combination trains adapters.
    """
    allowed = [fix for fix in fixes if fix[0] <= rank]
    for count in range(len(allowed) + 1):
        for chosen in combinations(allowed, count):
            ranks = [fix_rank for fix_rank, _ in chosen]
            if ranks.count(ADAPTERS) <= 1 and (rank in (SAME_RESULT, SHORTER) or rank in ranks):
                merged: Edits = {}
                for _, edits in chosen:
                    merged |= edits
                yield count, merged
