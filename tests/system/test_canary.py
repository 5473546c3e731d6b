"""Search for a password and for cloud and hub keys in everything that a real study with failures
writes.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import URL, make_url

pytestmark = [pytest.mark.probe, pytest.mark.server]

PASSWORD, KEY = "p4ssw0rd-c4n4ry", "k3y-c4n4ry"
SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "PGPASSWORD",
    "OPENAI_API_KEY",
    "NCCL_SECRET",
)
# 512 rows do not fit into 0.7 GiB, and the second trial crashes.
SPACE = """\
version: 1
knobs:
  micro_batch_size: {values: [4, 512], kind: system}
  seq_len: 16
  lora_rank: {values: [16, 32], kind: learning}
  precision: fp32
  checkpointing: {values: [none, full], kind: system}
"""
RUN = (
    "run",
    "--gpu",
    "cpu",
    "--model",
    "demo-3m",
    "--memory-gib",
    "0.7",
    "--space",
    "space.yaml",
    "--trials",
    "4",
)
RUN += ("--global-batch", "512", "--budget", "5m", "--study", "mine", "--out", "out", "--events")


class Study:
    """A folder in which commands run with secrets in their environment, and the output of these
    commands.
    """

    def __init__(self, folder: Path, url: URL) -> None:
        self.folder, self.url = folder, url.set(password=PASSWORD)
        self.output: dict[str, str] = {}
        (folder / "space.yaml").write_text(SPACE)

    def run(self, *arguments: str, url: URL | None = None) -> int:
        storage = (url or self.url).render_as_string(hide_password=False)
        secrets = dict.fromkeys(SECRETS, KEY) | {
            "AUTOTUNE_STORAGE": storage,
            "AUTOTUNE_INJECT": "crash:1",
        }
        ended = subprocess.run(
            [sys.executable, "-m", "autotune", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | secrets,
        )
        self.output[" ".join(arguments)] = ended.stdout + ended.stderr
        return ended.returncode


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, postgres: Callable[[], str]) -> Study:
    ran = Study(tmp_path_factory.mktemp("canary"), make_url(postgres()))
    assert ran.run(*RUN) == 0, ran.output
    return ran


def test_the_study_had_failures_and_ooms(study: Study) -> None:
    (text,) = study.output.values()
    assert '"oom"' in text and '"crash"' in text and "injected" in text


def test_no_command_prints_a_secret(study: Study) -> None:
    for words in (
        ["status"],
        ["status", "--json"],
        ["oom"],
        ["report"],
        ["export"],
        ["doctor"],
        ["--debug", "status", "x"],
    ):
        assert study.run(*words) in (0, 2, 3)
    for url in (
        study.url.set(database="no_such"),
        study.url.set(host="127.0.0.1", port=1, query={}),
    ):
        assert study.run("status", url=url) == 6
        assert study.run("--debug", "status", "mine", url=url) == 6
    assert study.run("doctor", url=url) == 3
    leaks = {words for words, text in study.output.items() if PASSWORD in text or KEY in text}
    assert len(study.output) >= 9 and leaks == set()


def test_no_file_holds_a_secret(study: Study) -> None:
    files = [path for path in study.folder.rglob("*") if path.is_file()]
    assert {"trials.jsonl", "report.html", "recipe.yaml", "worker.log", "trial-0001.log"} <= {
        path.name for path in files
    }
    assert [
        path
        for path in files
        if PASSWORD.encode() in path.read_bytes() or KEY.encode() in path.read_bytes()
    ] == []


def test_the_database_holds_no_secret(study: Study) -> None:
    with psycopg.connect(
        study.url.set(drivername="postgresql").render_as_string(hide_password=False)
    ) as connection:
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall()
        assert len(tables) > 5
        for (table,) in tables:
            rows = str(connection.execute(f'SELECT * FROM "{table}"').fetchall())
            assert PASSWORD not in rows and KEY not in rows, table
