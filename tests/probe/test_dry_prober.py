"""A DryProber answers for whole models by two depths, keeps its
answers, and refuses in a sentence.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.core.errors import Cancelled
from autotune.core.probe_types import DryCount, ModelShape, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.dry import prober as module
from autotune.dry import worker as dry_worker
from autotune.dry.prober import DryAnswer, DryProber
from autotune.planning import counted_memory
from tests.helpers.factories import TINY

pytestmark = pytest.mark.probe

CONFIG = TrainConfig(micro_batch_size=2, seq_len=64, precision="bf16_pure", checkpointing="none")
MODEL = TINY | {"model_type": "llama", "num_hidden_layers": 12, "vocab_size": 64}
REQUEST = ProbeRequest(config=CONFIG, model=MODEL, memory_gib=1.0)
UNCOUNTED = replace(CONFIG, quantization="int8", compile="per_layer")
UNCOUNTED_REASON = "the memory of compiled layers with an int8 base is not known"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dry")


def test_two_depths_give_the_whole_model_and_answers_are_kept(folder: Path) -> None:
    with DryProber(folder) as prober:
        by_depths = prober.count(REQUEST).count
        at_once = prober.count(replace(REQUEST, depth=12)).count
    assert by_depths is not None and at_once is not None
    assert by_depths.segment_peak_gib == pytest.approx(at_once.segment_peak_gib, rel=1e-6)
    assert by_depths.flops == at_once.flops
    assert (by_depths.trainable_params, by_depths.total_params) == (
        at_once.trainable_params,
        at_once.total_params,
    )

    with DryProber(folder) as again:
        assert again.count(REQUEST).count == by_depths
        assert again._process is None, "a kept answer needs no process"


def test_what_no_model_can_be_built_of_is_refused_in_a_sentence(folder: Path) -> None:
    encoder = REQUEST.model | {"model_type": "t5"}
    with DryProber(folder) as prober:
        answer = prober.count(replace(REQUEST, model=encoder))
        assert answer.count is None
        assert answer.refused == "transformers has no causal language model of type t5"
        mamba = {
            "model_type": "mamba2",
            "num_hidden_layers": 4,
            "hidden_size": 32,
            "num_heads": 8,
            "head_dim": 8,
        }
        on_output = replace(CONFIG, attention="eager", lora_targets="out_proj")
        refused = prober.count(replace(REQUEST, model=mamba, config=on_output)).refused or ""
        assert "'out_proj' is incompatible with Mamba" in refused
        assert prober.count(replace(REQUEST, config=UNCOUNTED)).refused == UNCOUNTED_REASON


def counted(gib: float) -> DryCount:
    """A count in which everything is as large."""
    whole = {"trainable_params": int(gib), "total_params": int(gib), "flops": {"mm": int(gib)}}
    sizes = ("model_gib", "adapters_gib", "gradients_gib", "optimizer_gib", "peak_allocated_gib")
    return DryCount(**dict.fromkeys(sizes, gib), segment_peak_gib={"forward": gib}, **whole)  # type: ignore[arg-type]


class Scripted(DryProber):
    """Answers in place of the process: `shape` for any model,
    and a GiB for each layer of a count.
    """

    def __init__(
        self,
        directory: Path,
        shape: ModelShape | str,
        refusing: tuple[int | None, ...] = (),
        *,
        shipped: bool = True,
    ) -> None:
        super().__init__(directory, shipped=shipped)
        self.shape, self.refusing = shape, refusing
        self.asked: list[Any] = []

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if "describe" in message:
            self.asked.append("describe")
            return (
                {"refused": self.shape}
                if isinstance(self.shape, str)
                else {"shape": to_data(self.shape)}
            )
        depth = from_data(ProbeRequest, message["count"]).depth
        self.asked.append(depth)
        if depth in self.refusing:
            return {"refused": f"not {depth}"}
        return {"count": to_data(counted(float(depth or 99)))}


REPEATED = ModelShape(num_layers=12, prefix=0, period=1)


@pytest.mark.parametrize(
    ("shape", "wanted", "refusing", "asked", "gib", "refused"),
    [
        (REPEATED, {}, (), ["describe", 2, 3], 12.0, None),
        (REPEATED, {"depth": 7}, (), [7], 7.0, None),
        (replace(REPEATED, period=None), {}, (), ["describe", None], 99.0, None),
        (REPEATED, {}, (2,), ["describe", 2, 3], None, "not 2"),
        (REPEATED, {}, (3,), ["describe", 2, 3], None, "not 3"),
        ("it has no layers", {}, (), ["describe"], None, "it has no layers"),
        (replace(REPEATED, no_adapters="no adapters"), {}, (), ["describe"], None, "no adapters"),
        *(
            (
                replace(REPEATED, no_adapters="no adapters"),
                {"config": config},
                (),
                ["describe", 2, 3],
                12.0,
                None,
            )
            for config in (
                replace(CONFIG, method="full", lora_rank=None),
                replace(CONFIG, lora_targets="attention"),
            )
        ),
        (
            REPEATED,
            {"config": replace(CONFIG, checkpointing="every_2")},
            (),
            ["describe", 2, 4],
            12.0,
            None,
        ),
    ],
    ids=str,
)
def test_a_whole_model_is_the_line_through_two_depths(
    tmp_path: Path,
    shape: Any,
    wanted: dict[str, Any],
    refusing: tuple[int, ...],
    asked: list[Any],
    gib: float | None,
    refused: str | None,
) -> None:
    """A model is described once.

    A count is kept in folders that are made for it, a refusal in memory.
    """
    folder = tmp_path / "a" / "b"
    prober = Scripted(folder, shape, refusing)
    answer = prober.count(replace(REQUEST, **wanted))
    assert prober.asked == asked and answer.refused == refused
    assert (answer.count and answer.count.segment_peak_gib["forward"]) == (
        None if gib is None else pytest.approx(gib)
    )
    assert prober.count(replace(REQUEST, **wanted)) == answer and prober.asked == asked
    if refused is not None:
        assert not folder.exists()
        return

    (kept,) = folder.iterdir()
    assert kept.suffix == ".json" and kept.read_text().endswith("}\n")
    assert from_data(DryAnswer, json.loads(kept.read_text())) == answer
    prober.count(replace(REQUEST, micro_steps=5, **wanted))
    assert prober.asked == asked + [one for one in asked if one != "describe"]
    kept.write_text("nothing")
    assert prober.count(replace(REQUEST, **wanted)) == answer and json.loads(kept.read_text())


def test_a_refusal_of_an_earlier_version_is_counted_again(tmp_path: Path) -> None:
    lost = DryAnswer(refused="the counting process ended")
    kept = tmp_path / f"{module.key_of(REQUEST, module.library_versions())}.json"
    kept.write_text(json.dumps(to_data(lost)))
    answer = Scripted(tmp_path, REPEATED).count(REQUEST)
    assert answer.count is not None
    assert from_data(DryAnswer, json.loads(kept.read_text())) == answer


def test_an_answer_that_cannot_be_kept_is_given_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Scripted(tmp_path / "file" / "dry", REPEATED).count(REQUEST).count is not None


def test_by_default_answers_are_in_this_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DryProber()._directory == tmp_path / "autotune" / "dry"


def test_a_kept_answer_holds_for_all_that_changes_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the versions of libraries too, but not for the processes that load data."""
    changes: list[dict[str, Any]] = [
        {"config": replace(CONFIG, seq_len=32)},
        {"model": MODEL | {"vocab_size": 65}},
        {"micro_steps": 1},
        {"depth": 3},
    ]

    def key(request: ProbeRequest = REQUEST) -> str:
        return module.key_of(request, module.library_versions())

    keys = {key(), *(key(replace(REQUEST, **change)) for change in changes)}
    assert len(keys) == 5
    assert key(replace(REQUEST, config=replace(CONFIG, loader_workers=4), seed=3)) == key()
    fixed = replace(REQUEST, config=replace(CONFIG, allocator="fixed"))
    assert key(fixed) == key()  # an extrapolated count has no segments
    assert key(replace(fixed, depth=12)) not in keys
    monkeypatch.setattr(module, "DRY_VERSION", 99)
    assert key() not in keys
    monkeypatch.undo()
    monkeypatch.setattr(module, "PACKAGES", ("pytest", "no-such-package"))
    module.library_versions.cache_clear()
    try:
        assert module.library_versions() == (f"pytest {pytest.__version__}", "no no-such-package")
        assert key() not in keys
    finally:
        module.library_versions.cache_clear()


def test_a_shipped_answer_holds_where_nothing_is_kept_and_dry_probes_count_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of one model and one version of dry probes, but of any versions of the libraries."""
    shipped = DryAnswer(count=counted(5.0))
    answers = {module.key_of(REQUEST): to_data(shipped)}
    monkeypatch.setattr(module, "shipped_answers", lambda: answers)
    prober = Scripted(tmp_path / "new", REPEATED)
    assert (
        prober.count(REQUEST) == shipped and prober.asked == [] and not prober._directory.exists()
    )
    wider = replace(REQUEST, model=MODEL | {"hidden_size": 128})
    assert prober.count(wider) != shipped and prober.asked == ["describe", 2, 3]
    monkeypatch.setattr(module, "DRY_VERSION", 99)
    assert prober.count(REQUEST) != shipped and prober.asked == ["describe", 2, 3] * 2
    monkeypatch.undo()
    monkeypatch.setattr(module, "shipped_answers", lambda: answers)
    by_itself = Scripted(tmp_path / "own", REPEATED, shipped=False)
    kept = by_itself.count(REQUEST)
    assert kept != shipped and by_itself.asked == ["describe", 2, 3]
    assert Scripted(tmp_path / "own", REPEATED).count(REQUEST) == kept


def test_an_installed_package_of_fast_kernels_gives_counts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shipped counts are without fast kernels; they hold for models whose layers need none."""
    hybrid = replace(REQUEST, model=MODEL | {"model_type": "qwen3_5_text"})
    attending = replace(hybrid, model=hybrid.model | {"layer_types": ["full_attention"] * 12})
    asked = (REQUEST, hybrid, attending)
    shipped = to_data(DryAnswer(count=counted(5.0)))
    answers = {module.key_of(request): shipped for request in asked}
    monkeypatch.setattr(module, "shipped_answers", lambda: answers)
    plain = module.library_versions()
    for one in asked:
        assert Scripted(tmp_path, REPEATED).count(one) == from_data(DryAnswer, shipped)

    monkeypatch.setattr("autotune.catalog.fast_kernels.is_installed", lambda name: True)
    module.library_versions.cache_clear()
    try:
        assert module.library_versions() == (*plain, "kernels of fla")
        given = [Scripted(tmp_path, REPEATED).count(one) for one in asked]
        assert [one == from_data(DryAnswer, shipped) for one in given] == [True, False, True]
    finally:
        module.library_versions.cache_clear()
    (kept,) = tmp_path.iterdir()
    assert kept.stem == module.key_of(hybrid, (*plain, "kernels of fla"))


@pytest.mark.parametrize(
    ("program", "longest_s", "refused"),
    [
        ("import time; time.sleep(600)", 0.25, "counting took longer than 0 s"),
        ("pass", 60.0, "the counting process ended"),
        ("input()", 60.0, "the counting process ended"),
    ],
)
def test_a_process_that_does_not_answer_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, longest_s: float, refused: str
) -> None:
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if program == "pass":
            process.wait()
        started.append(process)
        return process

    monkeypatch.setattr(module, "_start", start)
    monkeypatch.setattr(module, "LONGEST_S", longest_s)
    with DryProber(tmp_path) as prober:
        for number in (1, 2):
            assert prober.count(replace(REQUEST, depth=number)).refused == refused
            assert prober._process is None and len(started) == number
    assert all(process.poll() is not None for process in started)
    prober.__exit__()
    assert list(tmp_path.iterdir()) == []
    assert Scripted(tmp_path, REPEATED).count(replace(REQUEST, depth=1)).count is not None


def test_a_stop_ends_the_process_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of `stop_counting_if` is over afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return started[0]

    prober = DryProber(tmp_path, shipped=False)
    monkeypatch.setattr(module, "_start", start)
    monkeypatch.setattr(counted_memory, "_prober", lambda: prober)
    with pytest.raises(Cancelled), counted_memory.stop_counting_if(lambda: bool(started)):
        prober.count(replace(REQUEST, depth=1))
    assert started[0].poll() is not None and prober._process is None
    assert not prober.should_stop()


@pytest.mark.real_processes
def test_the_worker_is_limited_and_ends_with_the_prober(tmp_path: Path) -> None:
    """It has a CPU worker's environment, one thread, and 8 GiB beside what it starts with.

    It prints nothing.
    """
    with DryProber(tmp_path) as prober:
        assert prober._ask({"describe": {"model_type": "t5"}})["refused"].endswith("of type t5")
        assert prober._process is not None
        worker = psutil.Process(prober._process.pid)
        assert worker.cmdline()[-2:] == ["autotune.dry.worker", str(os.getpid())]
        assert (
            worker.environ()["OMP_NUM_THREADS"] == "1"
            and worker.environ()["MALLOC_ARENA_MAX"] == "1"
        )
        limit, _ = worker.rlimit(psutil.RLIMIT_DATA)
        assert 8 * 2**30 < limit < 10 * 2**30
        files = [os.readlink(f"/proc/{worker.pid}/fd/{number}") for number in (1, 2)]
        assert files == ["/dev/null", "/dev/null"]
    assert not worker.is_running() and prober._process is None


@pytest.mark.filterwarnings("ignore")  # as the worker does
def test_what_goes_wrong_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has at most 300 characters and one line, and no name of a Python exception."""
    model = MODEL | {"num_hidden_layers": 2}
    assert dry_worker._answer({"describe": model})["shape"]["num_layers"] == 2
    refused = dry_worker._answer({"count": to_data(replace(REQUEST, config=UNCOUNTED))})
    assert refused == {"refused": UNCOUNTED_REASON}
    for error, sentence in (
        (MemoryError("4 TiB"), "building the model takes more than 8 GiB, even without weights"),
        (ValueError("a\n  b " + "c" * 400), "a b " + "c" * 296),
        (KeyError(), "transformers cannot train this model on text alone"),
        (
            TypeError("backend raised: TypeError: 'NoneType' object is not subscriptable"),
            "transformers cannot train this model on text alone",
        ),
        (KeyError("a\nkey"), "transformers cannot train this model on text alone ('a\\nkey')"),
    ):

        def fail(model: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("autotune.probe.model_shape.describe", fail)
        assert dry_worker._answer({"describe": model}) == {"refused": sentence}

    # The code of a model raises errors about inputs that text does not have.
    scope: dict[str, Any] = {"__name__": "transformers.models.seeing"}
    exec("def forward(model): raise ValueError('pixel_values is missing')", scope)
    monkeypatch.setattr("autotune.probe.model_shape.describe", scope["forward"])
    assert dry_worker._answer({"describe": model}) == {
        "refused": "transformers cannot train this model on text alone (pixel_values is missing)"
    }


DBRX = {
    "model_type": "dbrx",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 128,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 2},
}
JETMOE = {
    "model_type": "jetmoe",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "kv_channels": 32,
    "num_local_experts": 2,
    "vocab_size": 128,
}


@pytest.mark.filterwarnings("ignore")  # as the worker does
@pytest.mark.parametrize("model", [DBRX, JETMOE], ids=lambda model: model["model_type"])
def test_a_model_whose_code_reads_values_is_left_to_probes(model: dict[str, Any]) -> None:
    """DBRX and JetMoe call their experts one after the other, by the numbers of a tensor."""
    knobs = {"lora_targets": "all-linear", "loss": "full", "checkpointing": "none"}
    request = replace(REQUEST, model=model, config=TrainConfig(precision="bf16_pure", **knobs))
    assert dry_worker._answer({"count": to_data(request)}) == {"refused": dry_worker.READS_VALUES}


@pytest.mark.filterwarnings("ignore")  # as the worker does
def test_a_model_without_a_known_head_says_so() -> None:
    """Its values that are None are defaults, and not the cause."""
    config = TrainConfig(seq_len=32, loss="full", precision="bf16_pure")
    request = replace(REQUEST, model={"model_type": "nemotron_h_omni"}, config=config, depth=None)
    refused = dry_worker._answer({"count": to_data(request)})["refused"]
    assert refused.endswith("does not say which layer is its output head (get_output_embeddings)")


def test_a_model_that_masks_no_token_is_counted() -> None:
    """BART's decoder makes a mask for all tokens, whose values do not exist on the meta device."""
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 2, "vocab_size": 512}
    bart = sizes | {"model_type": "bart", "is_decoder": True, "is_encoder_decoder": False}
    config = TrainConfig(seq_len=32, loss="full", method="full", precision="bf16_pure")
    request = replace(REQUEST, model=bart, config=config, depth=None)
    assert "count" in dry_worker._answer({"count": to_data(request)})


@pytest.mark.filterwarnings("ignore")  # as the worker does
@pytest.mark.parametrize(
    ("model_type", "missing"), [("lfm2_moe", "layer_types"), ("hunyuan_v1_dense", "head_dim")]
)
def test_a_missing_value_is_named(model_type: str, missing: str) -> None:
    """Python's own words, such as "'NoneType' object is not subscriptable", do not help a user."""
    refused = dry_worker._answer({"describe": {"model_type": model_type}})["refused"]
    assert refused.endswith(
        f" cannot build a {model_type} from this config (the config has no value for {missing})"
    )
