"""TRL's own training step on the meta device, for a dry probe.

TRL reads a few numbers from the device only to report them; here TRL gets constants instead. TRL's
Triton kernels do not run; only the bytes that they would read and write are counted.
"""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import trl.kernels.chunked_logprob as tiles
import trl.trainer.utils
from accelerate import PartialState
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.meta_device import replace_attribute
from autotune.probe.harness import random_rows
from autotune.probe.trl_trainer import examples_of, trl_trainer
from autotune.trainer.lean_trainer import training_arguments

META = torch.device("meta")


class DryTrlStep:
    """The micro batch of a request and its loss, made by TRL's trainer for the objective.

    `reference` is a copy of the untrained model. `reference` is None if the objective needs no
    reference model, or if only adapters are trained.
    """

    reference: nn.Module | None = None

    def __init__(self, request: ProbeRequest, base: nn.Module, model: nn.Module) -> None:
        """Give the model to TRL's trainer, which changes the model as in a real run."""
        config, objective = request.config, request.objective
        if objective.has_reference and config.method == "full":
            self.reference = copy.deepcopy(base).requires_grad_(False).eval()

        # `CountedStep` sets up checkpointing and the optimizer, so TRL's trainer must not.
        settings = training_arguments(config, accumulation=request.micro_steps, on_cpu=True)
        settings |= {
            "max_length": config.seq_len,
            "max_steps": 1,
            "gradient_checkpointing": False,
            "optim": "adamw_torch",
        }
        rows = random_rows(
            request.longest,
            2,
            torch.Generator(),
            packing=False,
            trained_share=request.trained_share,
        )

        # Make META the default device, so that TRL's copy of new adapters is on it too.
        with tempfile.TemporaryDirectory() as scratch, META:
            settings |= {"output_dir": scratch}
            self._trainer = trl_trainer(
                _MetaDeviceMixin, model, settings, rows, rows, objective, self.reference
            )
        self._examples = list(examples_of(rows, objective))
        self._model = self._trainer.accelerator.prepare_model(model)

    def batch(self) -> dict[str, torch.Tensor]:
        """The tensors of a micro batch."""
        return {
            name: tensor.to(META)
            for name, tensor in self._trainer.data_collator(self._examples).items()
        }

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro batch."""
        loss: torch.Tensor = self._trainer.compute_loss(self._model, batch)
        return loss


class _MetaDeviceMixin:
    """A mixin that lets TRL's trainers use a model on the meta device."""

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as for a CPU, and move it to the meta device."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        PartialState().device = META
        self.accelerator.state.device = META

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        pass


def replace_fp16(config: TrainConfig) -> TrainConfig:
    """Replace fp16, which accelerate refuses without a GPU, by bf16: both take the same memory."""
    if config.precision != "fp16_mixed":
        return config
    return TrainConfig(**config.as_dict() | {"precision": "bf16_mixed"})


@contextmanager
def simulate_trl(*, padded: bool) -> Iterator[None]:
    """Within this context, TRL works on the meta device as it does on CUDA.

    `padded` says that a mask hides the end of some rows.
    """
    with ExitStack() as stack:
        stack.enter_context(
            replace_attribute(trl.trainer.utils, "_use_triton", lambda device: True)
        )
        for name, function in (
            ("_use_triton", lambda device: False),
            # Like TRL's kernels, the first function reads the tile, and the second reads and writes
            # the tile.
            ("_forward_tile", lambda tile, *_, **__: tile.amax(-1)),
            ("_backward_tile", lambda tile, *_, **__: tile.neg_()),
            ("_addmm_fp32", _add_product),
        ):
            stack.enter_context(replace_attribute(tiles, name, function))

        stack.enter_context(_ScalarMode(padded))
        yield


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product as CUDA does: the sum has 32 bits, and the factors keep their dtypes."""
    if left.dtype is torch.float32:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


class _ScalarMode(TorchDispatchMode):
    """Supplies a value when code reads a number from the meta device.

    If code checks whether a mask is true everywhere, the value is True unless rows are padded. If
    the code reads a number, which TRL only reports, the value is 1.
    """

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self._padded = padded

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default or not args[0].is_meta:
            return func(*args, **(kwargs or {}))

        if args[0].dtype is torch.bool:
            return not self._padded
        return 1.0 if args[0].is_floating_point() else 1
