"""`plan` in a terminal."""

from typer.testing import CliRunner

from autotune.cli.app import app

PLAN = ("plan", "--gpu", "rtx-4090", "--model", "mistral-7b", "--details")


def test_the_tables_of_sizes_say_how_their_runs_differ_from_the_winner() -> None:
    details = " ".join(CliRunner().invoke(app, PLAN).stdout.split())
    assert (
        " best lora r32 1x1024 bf16_mixed ckpt-none adamw_torch_fused compiled chunked" in details
    )
    assert " and micro batch size, not compiled and without chunked loss (c: fits only" in details
