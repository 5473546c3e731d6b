"""Datasets of the Hub are read from the library's cache, by name, configuration and split."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.commands.train import _script_options
from autotune.problem.dataset import dataset_lengths, form_of
from autotune.trainer import hub_data
from autotune.trainer.reading import BadDataset, is_on_hub, read_rows
from tests.helpers.reported import run_command

PAIR = {"prompt": "two words", "completion": "an answer"}
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 8}]}
ROWS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "default": {"train": [PAIR] * 3, "test": [PAIR]},
    "chats": {"validation": [CHAT] * 2},
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two configurations of org/name in the cache, as a download leaves them, and no network."""
    datasets = pytest.importorskip("datasets")
    from datasets.packaged_modules.json.json import Json
    from huggingface_hub import constants

    folder = tmp_path_factory.mktemp("hub")
    for config, splits in ROWS.items():
        files = {name: str(folder / f"{config}-{name}.jsonl") for name in splits}
        for name, rows in splits.items():
            Path(files[name]).write_text("\n".join(map(json.dumps, rows)))
        Json(
            cache_dir=str(folder / "cache"),
            dataset_name="name",
            config_name=config,
            config_id=config,
            hash="0123456789abcdef",
            data_files=files,
        ).download_and_prepare()
    (folder / "cache" / "name").rename(folder / "cache" / "org___name")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield
    hub_data.load_files.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rows_are_those_of_the_configuration_and_split() -> None:
    rows = list(read_rows(Path("org/name:default")))
    assert [row for _, row in rows] == [PAIR] * 3
    assert rows[2][0] == "org/name:default/name-train.arrow, row 3"
    assert [row for _, row in read_rows(Path("org/name:default"), "test")] == [PAIR]
    assert [row for _, row in read_rows(Path("org/name:chats"), "validation")] == [CHAT] * 2
    assert form_of(Path("org/name:chats"), "validation") == "messages"
    assert dataset_lengths(Path("org/name:default"), None).number == 3


def test_a_local_path_wins() -> None:
    assert is_on_hub(Path("org/name"))
    Path("org/name").mkdir(parents=True)
    Path("org/name/rows.jsonl").write_text('{"text": "local"}\n')
    assert not is_on_hub(Path("org/name"))
    assert [row for _, row in read_rows(Path("org/name"))] == [{"text": "local"}]


@pytest.mark.parametrize(
    "path", ["org/rows.jsonl", "name", "/org/name", "./../org/name", "a/b/c", "org/na me", "~/name"]
)
def test_a_missing_path_is_no_name(path: str) -> None:
    assert not is_on_hub(Path(path))
    with pytest.raises(BadDataset, match=r"there is no file|has no"):
        list(read_rows(Path(path)))


@pytest.mark.parametrize(
    ("name", "split", "reason"),
    [
        (
            "org/other",
            None,
            r"there is no file or folder org/other, and .*the Hub.*; give a local path or"
            r" org/name:c",
        ),
        (
            "org/name:default",
            "evaluation",
            r"Unknown split \"evaluation\"\. Should be one of \['train', 'test'\]",
        ),
        ("org/name:other", None, r"org/name:other.*other"),
        (
            "org/name:default",
            "train[:10%]",
            r"train\[:10%\] is not the name of a split: give --split NAME",
        ),
    ],
)
def test_a_missing_dataset_has_a_remedy(name: str, split: str | None, reason: str) -> None:
    with pytest.raises(BadDataset, match=reason) as refused:
        list(read_rows(Path(name), split))
    assert "Error" not in str(refused.value)


class Hub(ThreadingHTTPServer):
    """A server with the Hub's API for datasets; its files are on another server, as on the Hub."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files = files
        self.asked: list[tuple[str, str | None]] = []  # paths with the tokens that came with them
        self.other: Hub | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))
        if self.server.other is not None and self.path in self.server.other.files:
            self.send_response(302)
            self.send_header("Location", self.server.other.url + self.path)
            self.end_headers()
        elif self.path in self.server.files:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.files[self.path])
        else:
            self.send_error(404)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The datasets of ROWS on a server, and no library `datasets`."""
    datasets = pytest.importorskip("datasets")
    parquet, listed = {}, {}
    with Hub({}) as found, Hub({}) as other:
        for config, splits in ROWS.items():
            listed[config] = {name: [f"{found.url}/{config}/{name}"] for name in splits}
            for name, rows in splits.items():
                datasets.Dataset.from_list(rows).to_parquet(tmp_path / "one.parquet")
                parquet[f"/{config}/{name}"] = (tmp_path / "one.parquet").read_bytes()
        found.files["/api/datasets/org/name/parquet"] = json.dumps(listed).encode()
        other.files, found.other = parquet, other
        for server in (found, other):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        hub_data.load_files.cache_clear()
        monkeypatch.setitem(sys.modules, "datasets", None)
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_TOKEN", "secret")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield found
        for server in (found, other):
            server.shutdown()
    hub_data.load_files.cache_clear()


def test_without_the_library_the_files_of_the_hub_are_downloaded_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        rows = list(read_rows(Path("org/name")))
        assert [row for _, row in rows] == [PAIR] * 3
        assert rows[2][0] == "org/name/00000.parquet, row 3"
        hub_data.load_files.cache_clear()
    assert hub.asked == [
        ("/api/datasets/org/name/parquet", "Bearer secret"),
        ("/default/train", "Bearer secret"),
    ]
    assert hub.other is not None and hub.other.asked == [("/default/train", None)]
    chats = Path("org/name:chats")
    assert [row for _, row in read_rows(chats, "validation")] == [CHAT] * 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub_data.load_files.cache_clear()
    assert [row for _, row in read_rows(chats, "validation")] == [CHAT] * 2


@pytest.mark.parametrize(
    ("name", "split", "reason"),
    [
        ("org/other", "train", "HTTP Error 404: Not Found"),
        ("org/name:more", "train", "its configurations are chats, default"),
        ("org/name", "dev", "its splits are test, train"),
    ],
)
def test_what_the_hub_does_not_give_has_a_reason(
    hub: Hub, name: str, split: str, reason: str
) -> None:
    with pytest.raises(BadDataset, match=f"does not give it: {reason}; give a local path or"):
        list(read_rows(Path(name), split))


def test_an_unreachable_hub_has_a_reason(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, _, errors = run_command("plan --model demo-3m --gpu a10 --dataset org/name")
    assert code == 2 and "Connection refused" in errors and "pip install datasets" in errors
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub_data.load_files.cache_clear()
    code, _, errors = run_command("plan --model demo-3m --gpu a10 --dataset org/name")
    assert code == 2 and "HF_HUB_OFFLINE is set" in errors


def test_the_exported_script_gets_the_name_and_not_a_path() -> None:
    assert _script_options(Path("org/name"), "test", None, None) == [
        "--dataset",
        "org/name",
        "--split",
        "test",
    ]
    Path("org/name").mkdir(parents=True)
    assert _script_options(Path("org/name"), None, None, None) == [
        "--dataset",
        str(Path("org/name").absolute()),
    ]


def test_commands_take_the_name() -> None:
    code, out, errors = run_command(
        "plan --json --model demo-3m --gpu a10 --dataset org/name:default --split train"
    )
    assert code == 0, errors
    assert json.loads(out)["workload"]["examples"] == 3
    code, _, errors = run_command("plan --model demo-3m --gpu a10 --dataset org/other")
    assert code == 2 and "  try: " in errors
