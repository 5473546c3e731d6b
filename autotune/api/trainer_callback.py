"""A callback for transformers' Trainer and TRL: it checks a run before step 1, and measures it.

Before the first step, the callback prints the answer of `autotune check` for the run. After some
steps, it prints the real peak and speed next to the estimate, and writes a file that
`autotune import` reads. It changes nothing in the training, and no problem of its own stops it.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from autotune.catalog import ModelSpec, list_models, resolve_model
from autotune.core.errors import UsageError
from autotune.core.objective import Objective
from autotune.core.probe_types import Evidence
from autotune.core.text import printable
from autotune.core.units import GIB, fmt_count, fmt_gib
from autotune.probe.meters import open_meter

if TYPE_CHECKING:
    from autotune.report.values.check import CheckReport

WARM_STEPS = 5  # steps before the timed ones: the first compile kernels and fill the allocator
STEPS = 20
MOST_LENGTHS = 2000  # examples whose lengths are read for the check
RUN_FILE = "autotune-run.yaml"
MEASURED_FILE = "autotune-measured.json"
# Whole numbers of a model's config that do not change its memory
NO_SIZES = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
# The arguments of TRL's trainers. All other arguments must be of a trainer of a language model.
ARGUMENTS = {
    Objective.SFT: "SFTConfig",
    Objective.DPO: "DPOConfig",
    Objective.KTO: "KTOConfig",
    Objective.REWARD: "RewardConfig",
    Objective.GRPO: "GRPOConfig",
}
PLAIN = "transformers"  # a key of the file, for a Trainer that is not TRL's
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
SHARED_KEYS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("max_steps", "bf16", "fp16", "torch_compile", "use_liger_kernel"),
    *("dataloader_num_workers", "max_length", "packing", "packing_strategy", "padding_free"),
    *("activation_offloading", "pad_to_multiple_of", "loss_type", "eval_strategy"),
    *("per_device_eval_batch_size", "train_sampling_strategy", "deepspeed", "fsdp"),
)
# The arguments of GRPOConfig that decide the memory. generation_batch_size follows from the others.
ROLLOUT_KEYS = (
    *("num_generations", "max_completion_length", "steps_per_generation", "num_iterations", "beta"),
    *("use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"),
    *("vllm_max_model_length", "vllm_tensor_parallel_size"),
    "vllm_importance_sampling_correction",
)


@dataclass(slots=True)
class _Counted:
    """The micro batches since the warm-up. Tokens are tensors, so that counting never waits."""

    tokens: int = 0
    useful: Any = 0

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Count a micro batch. Tokens whose attention mask is 0 are padding."""
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor):
            return
        mask = inputs.get("attention_mask")
        self.tokens += ids.numel()
        if mask is not None and mask.shape == ids.shape:
            self.useful = self.useful + mask.sum()
        else:
            self.useful = self.useful + ids.numel()


class PreflightCallback(TrainerCallback):
    """Prints the check of a run before step 1, and its real peak and speed after some steps.

    Args:
        gpu: the GPU to check the run for: a name, or auto for this machine's GPU.
        steps: the number of optimizer steps after which the measurement ends.
        file: the file for `autotune import`; by default in the Trainer's output directory.
        trainer: the name of the trainer in this file; by default TRL or transformers.
        run: the keys of the run's own file; by default, the Trainer's arguments describe the run.
        say: prints a line.
        options: options of `autotune check`, with underscores, such as price or examples.
    """

    def __init__(
        self,
        gpu: str = "auto",
        *,
        steps: int = STEPS,
        file: str | Path | None = None,
        trainer: str | None = None,
        run: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
        **options: Any,
    ) -> None:
        self.report: CheckReport | None = None
        self._options = {"gpu": gpu} | options
        self._steps = steps
        self._file = file
        self._trainer = trainer
        self._run = run
        self._print = say
        self._counted = _Counted()
        self._hook: Any = None
        self._resumed = 0  # the steps that an earlier run has done
        self._first: int | None = None  # the last step of the warm-up, once it is done
        self._began = self._ended = 0.0  # of the timed steps, and of the last step
        self._paused = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Print the check, and count the tokens of the micro batches from now on."""
        if not state.is_world_process_zero:
            return
        model = objects["model"]
        self._resumed = state.global_step
        try:
            self.report = self._check(args, model, objects.get("train_dataloader"))
        except Exception as error:  # an error of the check must not stop the training
            self._say(f"no check: {error}{_remedy(error)}")
        else:
            self._print_check(self.report)
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def count(module: Any, positional: Any, inputs: Mapping[str, Any]) -> None:
            if module.training:
                self._counted.add(inputs)

        self._hook = model.register_forward_pre_hook(count, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Leave out the time of an evaluation or a save after the last step."""
        if self._paused:
            self._began += perf_counter() - self._ended
            self._paused = False

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Start the clock after the warm-up, and end the measurement after the last step."""
        if self._hook is None:
            return
        done = state.global_step - self._resumed
        warm = max(1, min(WARM_STEPS, self._steps // 2))
        starts, ends = done == warm, done >= max(self._steps, warm + 1)
        self._paused = control.should_evaluate or control.should_save
        if starts or ends or self._paused:
            _wait(args)
            self._ended = perf_counter()
        if starts:
            self._began, self._first, self._counted = self._ended, state.global_step, _Counted()
        elif ends:
            self._finish(args, state, objects["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the measurement of a run that is shorter than the measurement."""
        has_begun = self._first is not None and state.global_step > self._first
        if self._hook is not None and has_begun:
            _wait(args)
            self._ended = self._ended if self._paused else perf_counter()
            self._finish(args, state, objects["model"])
        elif self._hook is not None:
            self._say("the run has too few steps to be measured")
        self._unhook()

    def _say(self, text: str) -> None:
        self._print(f"autotune: {printable(text)}")

    # --- the check

    def _check(self, args: Any, model: Any, loader: Any) -> "CheckReport":
        """Write the run as a file of its trainer or of TRL, and check this file."""
        from autotune.api.estimates import check

        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        shape = self._shape_of(model, folder)
        values = run_values(args, model, shape.name) if self._run is None else dict(self._run)
        options: dict[str, Any] = {"model": shape.name} | self._options
        lengths, examples = _lengths_of(loader)
        if PLAIN in values:  # unlike TRL, this Trainer cuts no example
            values["max_length"] = max(lengths, default=shape.max_seq_len)
        text = json.dumps(values, indent=2, default=str) + "\n"  # JSON is YAML, too
        (folder / RUN_FILE).write_text(text)
        with tempfile.TemporaryDirectory() as scratch:
            if lengths and not {"lengths", "dataset", "mean_tokens"} & options.keys():
                path = Path(scratch, "lengths.txt")
                path.write_text("\n".join(map(str, lengths)))
                options |= {"lengths": str(path)}
            if "tokens" not in options:
                options.setdefault("examples", examples)
            options.setdefault("gpus", args.world_size if args.world_size > 1 else None)
            if self._run is None:
                options["objective"] = objective_of(args, model)
            return check(folder / RUN_FILE, **options)

    def _shape_of(self, model: Any, folder: Path) -> ModelSpec:
        """Return the model of the catalogue, or a description of the model in `folder`."""
        config = model.config.to_dict()
        if (known := catalogued(config)) is not None:
            return known
        place = folder / "autotune-model"
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(config, default=str))
        return _named(resolve_model(str(place)), str(place))

    def _print_check(self, report: "CheckReport") -> None:
        from autotune.report.answers import check_answer

        answer = check_answer(report)
        self._say(answer.answer)
        self._say(f"needs {answer.needs}")
        if report.fix is not None:
            edits = ", ".join(f"{key}: {value}" for key, value in report.fix.edits.items())
            self._say(f"change {edits}: then it needs {fmt_gib(report.fix.estimate.need_gib)}")
        estimated = report.checked.estimate
        if estimated.tokens_per_s is not None:
            self._say(f"estimated speed: {fmt_count(estimated.tokens_per_s)} tokens/s a GPU")

    # --- the measurement

    def _finish(self, args: Any, state: Any, model: Any) -> None:
        """Print the real peak and speed, and write the file."""
        self._unhook()
        steps = state.global_step - (self._first or 0)
        step_s = (self._ended - self._began) / steps
        peak = torch.cuda.max_memory_reserved() / GIB if args.device.type == "cuda" else None
        useful = float(self._counted.useful) * args.world_size / (steps * step_s)
        need = self.report.checked.estimate.need_gib if self.report else None
        expected = "" if need is None else f" (estimated: {fmt_gib(need)})"
        memory = "a peak is measured on GPUs only" if peak is None else fmt_gib(peak) + expected
        self._say(f"measured in {steps} steps: {fmt_count(useful)} useful tokens/s, {memory}")
        try:
            path = self._write(args, model, steps, step_s, peak, useful)
        except Exception as error:  # as above
            self._say(f"the measurement cannot be shared: {error}{_remedy(error)}")
        else:
            self._say(f"wrote {path}; `autotune import {path}` makes estimates more accurate")

    def _write(
        self, args: Any, model: Any, steps: int, step_s: float, peak: float | None, useful: float
    ) -> Path:
        from autotune.core.files import write_atomic
        from autotune.planning.submission import MeasuredRow, make_submission

        if self.report is None:
            raise ValueError("the run was not checked")
        run = self.report.checked.run
        if run.objective is not Objective.SFT:
            raise ValueError("only supervised fine-tuning can be shared yet")
        fingerprint, device = machine(args.device.type)
        tokens = self._counted.tokens * args.world_size / steps
        rows = args.gradient_accumulation_steps * args.per_device_train_batch_size
        row = MeasuredRow(
            config=run.config,
            accumulation=args.gradient_accumulation_steps,
            tokens_per_row=tokens / rows / args.world_size,
            useful_tokens_per_s=useful,
            raw_tokens_per_s=tokens / step_s,
            step_time_s=step_s,
            peak_reserved_gib=peak,
            limit_gib=fingerprint.device_memory_gib,
            context_gib=None,
            power_w=None,
            evidence=Evidence.MEASURED,
        )
        submission = make_submission(
            fingerprint,
            device,
            date.today().isoformat(),
            model=self._shape_of(model, Path(args.output_dir)),
            trainer=self._trainer or ("trl" if hasattr(args, "packing") else "transformers"),
            global_batch=rows * args.world_size,
            rows=[row],
        )
        path = Path(self._file or Path(args.output_dir, MEASURED_FILE))
        write_atomic(path, submission.text)
        return path

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def objective_of(args: Any, model: Any) -> str:
    """Return the objective of a Trainer with these arguments.

    Raises UsageError if autotune does not know the trainer, or if the model is no language model.
    """
    kind = type(args)
    for objective, name in ARGUMENTS.items():
        if kind.__name__ == name:
            return str(objective)
    base = getattr(model, "get_base_model", lambda: model)()
    if kind.__module__.startswith("trl.") or not type(base).__name__.endswith(LANGUAGE_MODELS):
        raise UsageError(
            f"{kind.__name__} with a {type(base).__name__} is not supported",
            remedy="use a Trainer of a causal language model, or TRL's trainer for SFT, DPO, KTO, "
            "GRPO or rewards",
        )
    return str(Objective.SFT)


def run_values(args: Any, model: Any, name: str) -> dict[str, Any]:
    """Return a Trainer's run as the values of a TRL file. `name` names the model's shape."""
    kind = type(args).__name__
    generates = kind == ARGUMENTS[Objective.GRPO]
    keys = SHARED_KEYS + ROLLOUT_KEYS * generates
    values = {key: _plain(getattr(args, key, None)) for key in keys}
    base = getattr(model, "get_base_model", lambda: model)()
    frozen = next((one for one in base.parameters() if not one.requires_grad), None)
    dtype = (next(base.parameters()) if frozen is None else frozen).dtype
    # transformers 5.20 renamed the first of these arguments to the second.
    recomputes = ("gradient_checkpointing", "activation_checkpointing")
    values |= {
        "gradient_checkpointing": any(getattr(args, key, None) for key in recomputes),
        "model_name_or_path": name,
        "dataset_name": "the-dataset",
        "optim": _plain(args.optim),
        "dtype": "auto" if not dtype.is_floating_point else str(dtype).removeprefix("torch."),
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "use_peft": False,
    } | ({} if kind in ARGUMENTS.values() else {PLAIN: True})
    quantization: Any = getattr(model.config, "quantization_config", None)
    if quantization is not None and getattr(quantization, "load_in_4bit", False):
        values |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quantization.bnb_4bit_quant_type,
            "use_bnb_nested_quant": quantization.bnb_4bit_use_double_quant,
        }
    for adapters in getattr(model, "peft_config", {}).values():
        values |= {"use_peft": True, "lora_r": adapters.r, "lora_alpha": adapters.lora_alpha}
        values |= {"lora_dropout": adapters.lora_dropout, "use_dora": adapters.use_dora}
        targets = adapters.target_modules or "all-linear"
        values["lora_target_modules"] = targets if isinstance(targets, str) else sorted(targets)
        values["use_rslora"] = adapters.use_rslora
        values["lora_modules_to_save"] = list(adapters.modules_to_save or ()) or None
    return {key: value for key, value in values.items() if value not in (None, "", [])}


def _plain(value: Any) -> Any:
    """Return an argument as it stands in a file: names instead of enums."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return getattr(value, "value", value)


def catalogued(config: Mapping[str, Any]) -> ModelSpec | None:
    """Return the catalogue's model with the sizes of a model's config, or None."""
    sizes = _sizes(config)
    same = [
        model
        for model in list_models()
        if "num_hidden_layers" in (known := _sizes(model.config)) and known.items() <= sizes.items()
    ]
    name = config.get("_name_or_path")
    return next((one for one in same if name in (one.name, *one.aliases)), next(iter(same), None))


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type and the whole numbers of a config. `text_config` replaces equal keys."""
    flat = {**config, **(config.get("text_config") or {})}
    numbers = {key: value for key, value in flat.items() if isinstance(value, int)}
    kept = {key: value for key, value in numbers.items() if key not in NO_SIZES}
    return kept | {"model_type": config.get("model_type")}


def machine(kind: str) -> tuple[Any, str]:
    """Return the fingerprint of this machine's device, and the device's name in the catalogue."""
    from autotune.catalog import match_device

    fingerprint = open_meter(kind).fingerprint()
    if kind == "cpu":
        return fingerprint, "cpu"
    device = match_device(fingerprint.device, fingerprint.device_memory_gib)
    return fingerprint, fingerprint.device if device is None else device.name


def _named(model: ModelSpec, name: str) -> ModelSpec:
    from dataclasses import replace

    return replace(model, name=name)


def _lengths_of(loader: Any) -> tuple[list[int], int | None]:
    """Return the lengths of some tokenised examples, and the number of examples, if known."""
    dataset = getattr(loader, "dataset", None)
    lengths: list[int] = []
    with suppress(TypeError, KeyError, IndexError, AttributeError):
        count = len(dataset)  # type: ignore[arg-type]
        step = max(1, count // MOST_LENGTHS)
        examples: Any = dataset
        lengths = [len(examples[place]["input_ids"]) for place in range(0, count, step)]
        return lengths, count
    return [], None


def _wait(args: Any) -> None:
    if args.device.type == "cuda":
        torch.cuda.synchronize()


def _remedy(error: Exception) -> str:
    remedy = getattr(error, "remedy", None)
    return f" (try: {remedy})" if remedy else ""
