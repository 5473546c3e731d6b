"""TRL's trainer as the loop of a probe: what it is given, and the clock of a run by TRL's own
script.
"""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import trainer as transformers_trainer

pytest.importorskip("trl")

from datasets import Dataset

from autotune.probe import trl_entry
from autotune.probe import trl_trainer as module
from autotune.probe.trl_trainer import TrlClock
from autotune.trainer.clock import Clock


def row(*labels: int) -> dict[str, torch.Tensor]:
    """A row of tokens from 10 on."""
    return {"input_ids": torch.arange(10, 10 + len(labels)), "labels": torch.tensor(labels)}


# the Trainer's arguments have new names from transformers 5.23 on
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trl_gets_rows_without_their_padding_and_pads_them_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two different rows make three; the prompt of the second is not trained on, nor is what is
    padding.
    """
    monkeypatch.setattr(module, "SFTTrainer", object)

    class Given:
        def __init__(self, **given: Any) -> None:
            self.given = given

    first, second = row(-100, 11, 12, 13, -100), row(-100, -100, 12, 13)
    model = nn.Linear(1, 1)
    settings = {
        "output_dir": "out",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "max_length": 7,
    }
    made = module.trl_trainer(Given, model, settings, [first, second, first], [second])
    assert type(made).__name__ == "TrlProbeTrainer" and isinstance(made, Given)
    given = made.given
    assert given["model"] is model and given["processing_class"].pad_token_id == 0
    assert given["train_dataset"]["input_ids"][:] == [[10, 11, 12, 13]] * 3
    assert given["train_dataset"]["labels"][:] == [
        [-100, 11, 12, 13],
        [-100, -100, 12, 13],
        [-100, 11, 12, 13],
    ]
    assert given["eval_dataset"]["input_ids"][:] == [[10, 11, 12, 13]]
    args = given["args"]
    assert args.dataset_kwargs == {"skip_prepare_dataset": True} and (
        args.max_length,
        args.output_dir,
    ) == (7, "out")


def test_the_clock_of_trl_is_the_scripts_but_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step ends as it is over, before what follows it; another is only reported."""
    done: list[Any] = []
    monkeypatch.setattr(Clock, "__init__", lambda clock: None)
    monkeypatch.setattr(Clock, "mark", lambda clock: done.append("mark"))
    monkeypatch.setattr(
        Clock, "on_train_begin", lambda clock, *asked: done.append(("begin", *asked))
    )
    monkeypatch.setattr(Clock, "on_step_end", lambda clock, *asked: done.append("step"))
    clock = TrlClock()  # type: ignore[call-arg]
    assert (clock.num_steps, clock.tokens_per_step) == (0, 0.0)
    rows = {"input_ids": [[1] * 4, [1] * 8]}
    dataset = Dataset.from_dict(rows)
    args = SimpleNamespace(
        per_device_train_batch_size=3, gradient_accumulation_steps=5, device="cuda:0"
    )
    loader = SimpleNamespace(dataset=dataset)
    monkeypatch.setattr(module, "load_attention", lambda *asked: done.append(("load", *asked)))
    clock.on_train_begin(args, "state", "control", "model", train_dataloader=loader)
    assert clock.tokens_per_step == 90.0
    for step in (1, 2):
        clock.on_step_end(args, SimpleNamespace(global_step=step, max_steps=2), "control")
        assert clock.num_steps == step
    clock.on_train_end(args, None, None)
    load = ("load", "model", "cuda:0")
    assert done == [load, ("begin", args, "state", "control", "model"), "step", "step", "mark"]


@pytest.mark.parametrize(("seconds", "speed"), [(2.0, 45.0), (None, None)])
def test_trls_own_script_runs_with_a_clock_and_says_what_it_measured(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    seconds: float | None,
    speed: float | None,
) -> None:
    made: list[Any] = []
    ran: list[Any] = []

    def clock(**asked: Any) -> Any:
        measured = {"seconds_per_step": seconds, "peak_reserved_gib": 1.5}
        made.append(
            SimpleNamespace(
                asked=asked, measurements=lambda: measured, tokens_per_step=90.0, num_steps=4
            )
        )
        return made[-1]

    callbacks: list[Any] = []
    monkeypatch.setattr(trl_entry, "die_with_parent", lambda: ran.append("die"))
    monkeypatch.setattr(module, "TrlClock", clock)
    monkeypatch.setattr(transformers_trainer, "DEFAULT_CALLBACKS", callbacks)
    monkeypatch.setattr(
        runpy, "run_module", lambda name, **how: ran.append((name, how, [*callbacks]))
    )
    monkeypatch.setattr(sys, "argv", ["entry", "sft"])
    trl_entry.main()
    assert made[0].asked == {"saves": False, "progress": "steps.jsonl"}
    assert ran == ["die", ("trl.scripts.sft", {"run_name": "__main__", "alter_sys": True}, made)]
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == {
        "seconds_per_step": seconds,
        "peak_reserved_gib": 1.5,
        "steps": 4,
        "tokens_per_second": speed,
    }
