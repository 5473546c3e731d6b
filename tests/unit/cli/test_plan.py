"""`plan` in a terminal."""

import json

from typer.testing import CliRunner

from autotune.cli.app import app

PLAN = ("plan", "--gpu", "rtx-4090", "--model", "mistral-7b", "--details")


def test_the_tables_of_sizes_say_how_their_runs_differ_from_the_winner() -> None:
    details = " ".join(CliRunner().invoke(app, PLAN).stdout.split())
    assert (
        " best lora r32 1x1024 bf16_mixed ckpt-none adamw_torch_fused compiled chunked" in details
    )
    assert " and micro batch size, not compiled and without chunked loss (c: fits only" in details


def test_json_has_the_warnings_that_the_text_prints_to_stderr() -> None:
    """An agent reads only the JSON, and tokens that are cut off are lost."""
    asked = ["plan", "--gpu", "h100", "--model", "qwen2.5-0.5b", "--tokens-per-example", "90000"]
    done = CliRunner().invoke(app, [*asked, "--json"])
    (warning,) = json.loads(done.stdout)["warnings"]
    assert "cut off" in warning and f"warning: {warning}" in done.stderr
    short = CliRunner().invoke(app, [*asked[:-1], "64", "--json"])
    assert json.loads(short.stdout)["warnings"] == []
