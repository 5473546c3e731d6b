"""One project's part of `mixtures_beside.py`: train a mixture of experts with that project's
kernels, one configuration after another, and print a row for each.

It runs in a process of its own, in which the packages of the project come before all others. The
base has random weights and is made on the device. A project changes the model as its own documents
say. The training loop is the same for all projects: whole optimizer steps of one micro batch, with
clipping and fused AdamW. Before any time is measured, the output and the gradients of a layer of
experts are compared with a plain loop over the experts.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROW = "ROW "  # begins each line of output that is a row
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_CACHE_AUTOTUNING": "1",
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["gate_up_proj", "down_proj"]
GIB = 2**30
WARM_STEPS = 2  # compilation and tuning of kernels end in them
TIMED_STEPS = 3
RECOMPILE_LIMIT = 64
RATE = 1e-5
TOLERANCE = 0.02  # relative error of products of numbers with 8 bits
NONE, FULL = "none", "full"
CHECK = "check"
LOST = 3  # exit status after an error that ends all use of the GPU in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to train, as JSON."""

    model: dict[str, Any]  # the keyword arguments of a transformers config
    device: str
    rank: int
    alpha: int
    seq_len: int
    memory_gib: float
    micro_batches: list[int]
    seconds: float  # no configuration is begun after this time
    done: list[str] = field(default_factory=list)  # configurations that have a row already


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model with adapters, and how to use it."""

    model: Any
    loss: Callable[[Any], Any]  # of token ids (rows x tokens)
    recompute: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One way to use a project. `load` may change the model of the stage before."""

    label: str
    load: Callable[[], Loaded]
    kinds: tuple[str, ...] = (FULL,)  # of recomputation


# --- the projects


def axolotl(task: Task) -> list[Stage]:
    """Axolotl's ScatterMoE kernels for LoRA, registered as its plugin does.

    The rest of each layer is compiled, or it uses the kernels that Axolotl's examples add: Liger's
    norms, and Axolotl's own attention with LoRA. The loss is autotune's in chunks, which needs less
    time than Liger's.
    """
    import torch

    # The package's own file imports the schema of all settings; only kernels are needed.
    found = find_spec("axolotl.integrations")
    assert found is not None and found.submodule_search_locations
    for name in ("kernels", "kernels.libs"):
        package = types.ModuleType(f"axolotl.integrations.{name}")
        place = Path(found.submodule_search_locations[0], *name.split("."))
        package.__path__ = [str(place)]
        sys.modules[package.__name__] = package
    from axolotl.integrations.kernels.libs.scattermoe_lora.experts import (
        register_scattermoe_experts,
    )
    from axolotl.integrations.kernels.libs.scattermoe_lora.runtime import (
        configure_scattermoe_runtime,
    )
    from peft.tuners.lora.layer import ParamWrapper

    register_scattermoe_experts()
    configure_scattermoe_runtime({"gradient_checkpointing": True})
    if task.device == "cuda":
        compile_kernels_at_once()
    # Their kernels choose a configuration when they run, which Dynamo cannot trace.
    ParamWrapper.forward = torch._dynamo.disable(ParamWrapper.forward)

    made: list[Loaded] = []

    def load() -> Loaded:
        if not made:
            base = random_model(task, experts_implementation="scattermoe")
            made.append(with_chunked_loss(adapted(base, task)))
        return made[0]

    def compiled() -> Loaded:
        loaded = load()
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        for layer in layers_of(loaded.model):
            layer.compile(dynamic=False)
        return loaded

    def eager() -> Loaded:
        loaded = load()
        for layer in layers_of(loaded.model):
            layer._compiled_call_impl = None
        return loaded

    def kernels() -> Loaded:
        loaded = eager()
        use_axolotl_attention(loaded.model)
        return loaded

    return [
        Stage(label="compiled", load=compiled),
        Stage(label="eager, Liger's and Axolotl's kernels", load=kernels, kinds=(FULL, NONE)),
    ]


def use_axolotl_attention(model: Any) -> None:
    """Use Liger's norms, and Axolotl's fused norm and rotation and its LoRA of attention."""
    callbacks = types.ModuleType("axolotl.utils.callbacks")
    found = find_spec("axolotl.utils")
    assert found is not None and found.submodule_search_locations
    # The package's own file imports trackers; a module in it is needed.
    callbacks.__path__ = [str(Path(found.submodule_search_locations[0]) / "callbacks")]
    sys.modules[callbacks.__name__] = callbacks
    from axolotl.monkeypatch.lora_kernels import apply_lora_kernel_patches
    from axolotl.monkeypatch.models.qwen3_moe.fused_attn import patch_qwen3_moe_fused_attn
    from axolotl.utils.dict import DictDefault
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

    apply_liger_kernel_to_qwen3_moe(
        rope=False,  # it is a part of Axolotl's attention
        swiglu=False,
        fused_linear_cross_entropy=False,
        model=model.get_base_model(),
    )
    patch_qwen3_moe_fused_attn()
    keys = {"lora_qkv_kernel": True, "lora_o_kernel": True, "use_scattermoe": True}
    apply_lora_kernel_patches(model, DictDefault(keys))


def unsloth(task: Task) -> list[Stage]:
    """The FastLanguageModel of unsloth, whose experts are its own grouped products.

    It computes the loss and compiles parts of the model as it wants to. Only the reading of weights
    is replaced, because the weights are random. Its own recomputation keeps the layers' inputs in
    host memory.
    """
    os.environ["UNSLOTH_COMPILE_LOCATION"] = tempfile.mkdtemp(prefix="unsloth-compiled-")
    from unsloth import FastLanguageModel  # isort: skip
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_config(task)

    def from_pretrained(*args: Any, attn_implementation: str | None = None, **_: Any) -> Any:
        model = random_model(task, attn_implementation=attn_implementation or "sdpa")
        model.config._name_or_path = model.name_or_path = str(folder)
        return model

    AutoModelForCausalLM.from_pretrained = from_pretrained

    def loading(kind: Any) -> Callable[[], Loaded]:
        def load() -> Loaded:
            free_memory()
            base, _ = FastLanguageModel.from_pretrained(
                str(folder),
                max_seq_length=task.seq_len,
                dtype=torch.bfloat16,
                load_in_4bit=False,
                local_files_only=True,
            )
            model = FastLanguageModel.get_peft_model(
                base,
                r=task.rank,
                lora_alpha=task.alpha,
                lora_dropout=0,
                bias="none",
                target_modules=ATTENTION + EXPERTS,
                target_parameters=[f"mlp.experts.{name}" for name in EXPERTS],
                use_gradient_checkpointing=kind,
                random_state=0,
            )
            FastLanguageModel.for_training(model, use_gradient_checkpointing=kind)
            return Loaded(
                model=model,
                loss=lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss,
                recompute=lambda _: None,
            )

        return load

    return [
        Stage(label="FastLanguageModel", load=loading(kind), kinds=(name,))
        for name, kind in {"unsloth": "unsloth", FULL: True, NONE: False}.items()
    ]


def plain(task: Task) -> list[Stage]:
    """Train with PEFT as it is, to try this program without a project's kernels."""
    return [
        Stage(
            label="eager",
            load=lambda: with_chunked_loss(adapted(random_model(task), task)),
            kinds=(FULL, NONE),
        )
    ]


TOOLS = {"axolotl": axolotl, "unsloth": unsloth, "plain": plain}


# --- the model


def random_model(task: Task, **settings: Any) -> Any:
    """Make a model with random bf16 weights on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**task.model)
    arguments = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"} | settings
    with torch.device(task.device):
        model = AutoModelForCausalLM.from_config(config, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
    model.config.use_cache = False
    return model.train()


def write_config(task: Task) -> Path:
    """Write a folder with the config and a tokenizer, but no weights."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import AutoConfig, PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="mixture-"))
    config = AutoConfig.for_model(**task.model)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    letters = {"<pad>": 0, "</s>": 1} | {chr(97 + index): index + 2 for index in range(26)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(letters, [])), pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def adapted(base: Any, task: Task) -> Any:
    """Add PEFT's adapters, in fp32, to attention and to every expert."""
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=task.rank,
        lora_alpha=task.alpha,
        lora_dropout=0.0,
        target_modules=ATTENTION,
        target_parameters=[f"mlp.experts.{name}" for name in EXPERTS],
        task_type="CAUSAL_LM",
    )
    with torch.device(task.device):
        return get_peft_model(base, config)


def with_chunked_loss(model: Any) -> Loaded:
    """Use autotune's loss, which never holds the logits of all tokens."""
    from autotune.trainer.chunked_loss import chunked_loss

    base = model.get_base_model()
    compute = chunked_loss(base)
    # Otherwise the first layer is compiled on its own, and reentrant code warns.
    base.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.requires_grad_(True)
    )

    def recompute(kind: str) -> None:
        if kind == NONE:
            base.gradient_checkpointing_disable()
        else:
            base.gradient_checkpointing_enable({"use_reentrant": False})

    return Loaded(
        model=model,
        loss=lambda ids: compute(model(input_ids=ids, use_cache=False), ids),
        recompute=recompute,
    )


def layers_of(model: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]


def compile_kernels_at_once() -> None:
    """Compile all candidates of a tuned Triton kernel in threads before they are timed.

    Triton would compile one candidate after another. The candidates and their choice stay.
    """
    from concurrent.futures import ThreadPoolExecutor

    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.run
    seen: set[Any] = set()

    def run(self: Any, *args: Any, **given: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False)) | given
        key = (id(self), *(str(named.get(name)) for name in self.keys))
        if len(self.configs) > 1 and key not in seen and not given.get("warmup"):
            seen.add(key)
            began = time.monotonic()
            rest = {name: value for name, value in given.items() if name != "warmup"}
            try:
                with (
                    ThreadPoolExecutor(os.cpu_count()) as pool,
                    AsyncCompileMode(pool, ignore_errors=True),
                ):
                    self.warmup(*args, **rest)
            except Exception:  # the kernel is compiled as usual
                traceback.print_exc(file=sys.stderr)
            else:
                name = getattr(self.base_fn, "__name__", "kernel")
                print(f"{name} {key[1:]}: {time.monotonic() - began:.1f} s", file=sys.stderr)
        return original(self, *args, **given)

    Autotuner.run = run


# --- the check


def check_experts(loaded: Loaded, task: Task) -> dict[str, float]:
    """Compare the first layer's adapted experts with a plain loop over experts in fp32.

    Return the relative errors of the output and of each gradient.
    """
    import torch

    wrapper = next(one for one in loaded.model.modules() if type(one).__name__ == "ParamWrapper")
    adapters, experts = {}, wrapper
    while hasattr(experts, "lora_A"):
        adapters[experts.parameter_name] = experts
        experts = experts.base_layer
    assert set(adapters) == set(EXPERTS), sorted(adapters)

    generator = torch.Generator(task.device).manual_seed(0)
    tokens = task.micro_batches[0] * task.seq_len
    count, hidden = experts.num_experts, experts.down_proj.shape[1]
    near = {"device": task.device, "generator": generator}
    rows = torch.randn(tokens, hidden, dtype=torch.bfloat16, **near).requires_grad_(True)
    per_token = task.model["num_experts_per_tok"]
    scores = torch.randn(tokens, count, **near).softmax(-1)
    weights, index = scores.topk(per_token)
    upstream = torch.randn(tokens, hidden, dtype=torch.bfloat16, **near)

    ups = [one.lora_B["default"].weight for one in adapters.values()]
    downs = [one.lora_A["default"].weight for one in adapters.values()]
    with torch.no_grad():  # new adapters change nothing, because B is zero
        for up in ups:
            up.normal_(0.0, 0.05, generator=generator)
    wanted = [rows, *downs, *ups]
    names = ["output", "of_rows", *(f"of_{one}_A" for one in adapters)]
    names += [f"of_{one}_B" for one in adapters]

    weights = weights.to(torch.bfloat16)
    with autocast(task.device):
        output = wrapper(rows, index, weights)
    found = [output, *torch.autograd.grad(output, wanted, upstream)]
    expected = reference(experts, adapters, rows, index, weights)
    expected = [expected, *torch.autograd.grad(expected, wanted, upstream.float())]
    with torch.no_grad():
        for up in ups:
            up.zero_()
    return {
        name: float((one.float() - other).norm() / other.norm())
        for name, one, other in zip(
            names, map(detached, found), map(detached, expected), strict=True
        )
    }


def detached(tensor: Any) -> Any:
    return tensor.detach().float()


def reference(experts: Any, adapters: dict[str, Any], rows: Any, index: Any, weights: Any) -> Any:
    """Return the experts' weighted sums by a loop, in fp32, with PEFT's sum of W and BA."""
    import torch

    gate_up, down = (
        getattr(experts, name).float() + adapters[name].get_delta_weight("default").float()
        for name in EXPERTS
    )
    total = torch.zeros_like(rows, dtype=torch.float32)
    for expert in range(experts.num_experts):
        token, place = (index == expert).nonzero(as_tuple=True)
        own = rows[token].float()
        gate, up = (own @ gate_up[expert].T).chunk(2, -1)
        out = (experts.act_fn(gate) * up) @ down[expert].T
        total = total.index_add(0, token, out * weights[token, place, None].float())
    return total


def autocast(device: str) -> Any:
    import torch

    return torch.autocast(device, torch.bfloat16)


# --- the measurement


class Clock:
    """The device's own time between marks."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        if not self._is_cuda:
            return [end - begin for begin, end in zip(self._marks, self._marks[1:], strict=False)]
        import torch

        torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


def train(loaded: Loaded, optimizer: Any, task: Task, micro_batch: int) -> dict[str, Any]:
    """Measure whole optimizer steps, each of one micro batch."""
    import torch

    shape = (micro_batch, task.seq_len)
    ids = torch.randint(task.model["vocab_size"], shape, device=task.device)
    trained = [one for one in loaded.model.parameters() if one.requires_grad]
    clock = Clock(task.device)
    losses = []
    for step in range(WARM_STEPS + TIMED_STEPS):
        if step == WARM_STEPS:
            if task.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            clock.mark()
        with autocast(task.device):
            loss = loaded.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step >= WARM_STEPS:
            clock.mark()

    seconds = clock.seconds()
    values = [float(one) for one in losses]
    if not all(value == value and value < 1e4 for value in values):
        raise ValueError(f"the losses are {values}")
    row = {
        "outcome": "ok",
        "tokens_per_s": micro_batch * task.seq_len / statistics.median(seconds),
        "step_s": statistics.median(seconds),
        "steps_s": seconds,
        "loss": values[0],
    }
    if task.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return row


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def reporting(row: dict[str, Any]) -> Iterator[None]:
    """Turn an error in this block into the outcome of the row, and print the row."""
    import torch

    began = time.monotonic()
    try:
        yield
    except torch.OutOfMemoryError as error:
        row |= {"outcome": "oom", "reason": str(error).splitlines()[0][:200]}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        text = f"{type(error).__name__}: {error}"
        row |= {"outcome": "failed", "reason": text[:400]}
    row["seconds"] = time.monotonic() - began
    print(ROW + json.dumps(row), flush=True)
    if "CUDA error" in row.get("reason", ""):
        sys.exit(LOST)


def measure(stages: list[Stage], task: Task, about: dict[str, Any]) -> None:
    """Measure all configurations of all stages, as long as there is time."""
    import torch

    until = time.monotonic() + task.seconds
    is_checked = CHECK in task.done
    for stage in stages:
        wanted = [
            (kind, size)
            for kind in stage.kinds
            # Without recomputation, only small micro batches may fit.
            for size in (sorted(task.micro_batches) if kind == NONE else task.micro_batches)
            if label(stage, kind, size) not in task.done
        ]
        if not wanted or time.monotonic() > until:
            continue
        loaded = optimizer = None
        row = about | {"config": f"{stage.label}: load"}
        with reporting(row):
            loaded = stage.load()
            trained = [one for one in loaded.model.parameters() if one.requires_grad]
            row |= {"outcome": "loaded", "trained": sum(one.numel() for one in trained)}
        if loaded is None:
            continue

        if not is_checked:
            row = about | {"config": CHECK}
            with reporting(row):
                errors = check_experts(loaded, task)
                right = max(errors.values()) < TOLERANCE
                row |= {"outcome": "right" if right else "wrong", "errors": errors}
            free_memory()
            if row["outcome"] == "wrong":
                return  # the speed of a wrong computation is no baseline
            is_checked = row["outcome"] == "right"

        fused = task.device == "cuda"
        optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=fused)
        too_large: dict[str, int] = {}
        for kind, size in wanted:
            row = about | {
                "config": label(stage, kind, size),
                "micro_batch": size,
                "recompute": kind,
                "checked": is_checked,
            }
            if time.monotonic() > until:
                return
            with reporting(row):
                if size >= too_large.get(kind, sys.maxsize):
                    row |= {"outcome": "oom", "reason": f"{too_large[kind]} rows do not fit"}
                else:
                    loaded.recompute(kind)
                    row |= train(loaded, optimizer, task, size)
            if row["outcome"] == "oom":
                too_large[kind] = min(size, too_large.get(kind, size))
            optimizer.zero_grad(set_to_none=True)
            free_memory()
        del loaded, optimizer, trained


def label(stage: Stage, kind: str, size: int) -> str:
    return f"{stage.label}, recomputation {kind}, {size} rows"


def version_of(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def main() -> None:
    project, path = sys.argv[1:3]
    task = Task(**json.loads(Path(path).read_text(encoding="utf-8")))
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    stages = TOOLS[project](task)  # some projects must be imported first

    import torch

    packages = ("torch", "triton", "transformers", "peft", "liger-kernel", "unsloth_zoo")
    about = {
        "project": project,
        "version": version_of(project),
        "packages": {name: found for name in packages if (found := version_of(name))},
    }
    torch.manual_seed(0)
    if task.device == "cuda":
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, task.memory_gib * GIB / total))
    measure(stages, task, about)


if __name__ == "__main__":
    main()
