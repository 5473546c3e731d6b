import pytest

from autotune.report.engine_message import read_engine_message
from autotune.report.oom_message import read_message

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 23.69 GiB of which 1.06 GiB is\nfree. Including non-PyTorch memory, this process "
    "has 22.62 GiB memory in use. Of the allocated memory 21.50 GiB is allocated by PyTorch, and "
    "512.00 MiB is reserved by PyTorch but unallocated."
)
OTHERS = (
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 16.00 GiB total capacity; 4.50 GiB "
    "already allocated; 0 bytes free; 5.00 GiB reserved in total by PyTorch)"
)
BLOCKS = (
    "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacty of 79.00 GiB of "
    "which 128.00 MiB is free. Process 7 has 78.87 GiB memory in use. Of the allocated memory "
    "70.00 GiB is allocated by PyTorch, with 10.00 MiB allocated in private pools (e.g., CUDA "
    "Graphs), and 8.50 GiB is reserved by PyTorch but unallocated."
)
HIP = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 64.00 GiB of which 1.50 GiB is free. Of the allocated memory 40.00 GiB is "
    "allocated by PyTorch, and 18.50 GiB is reserved by PyTorch but unallocated."
)
HOST = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes."


@pytest.mark.parametrize(
    ("text", "cause", "sizes"),
    [
        (NEW, "too large", (23.69, 2.0, 21.5, 0.5, 0.01)),
        (f"step 1\n{NEW}\n{OTHERS}", "too large", (23.69, 2.0, 21.5, 0.5, 0.01)),  # the first one
        (OTHERS, "other programs", (16.0, 20 / 1024, 4.5, 0.5, 11.0)),
        (BLOCKS, "fragmentation", (79.0, 0.25, 70.0, 8.5, 0.375)),
        (
            HIP,
            "fragmentation",
            (64.0, 2.0, 40.0, 18.5, 4.0),
        ),  # more free blocks than others' memory
        (HIP.replace("18.50", "2.50"), "other programs", (64.0, 2.0, 40.0, 2.5, 20.0)),
        (HOST, "host", (None, 1.0, None, None, None)),
        ("Killed", "host", (None,) * 5),
        ("step 3\nrun.sh: line 7: 99\nKilled  python train.py\n", "host", (None,) * 5),
        ("Out of memory: Killed process 99 (python) total-vm:9kB", "host", (None,) * 5),
        ("exitcode  : -9 (pid: 7)\ntraceback : Signal 9 (SIGKILL) received", "host", (None,) * 5),
        (
            "RuntimeError: DataLoader worker is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory.",
            "host",
            (None,) * 5,
        ),
        ("slurmstepd: error: Detected 1 oom_kill event", "host", (None,) * 5),
        (f"{NEW}\nKilled", "too large", (23.69, 2.0, 21.5, 0.5, 0.01)),
        ("CUDA error: out of memory", "too large", (None,) * 5),
    ],
)
def test_a_message_gives_its_sizes_and_the_cause(
    text: str, cause: str, sizes: tuple[float | None, ...]
) -> None:
    message = read_message(text)
    assert message is not None and message.cause == cause
    found = (
        message.capacity_gib,
        message.requested_gib,
        message.allocated_gib,
        message.free_blocks_gib,
        message.outside_gib,
    )
    assert found == pytest.approx(sizes, abs=1e-6)
    first, *rest = message.answer()
    assert message.first_change in first
    assert ("autotune check" in " ".join(rest)) is (cause == "too large")


def test_the_tools_of_an_amd_gpu_are_named() -> None:
    fragmented, shared = read_message(HIP), read_message(HIP.replace("18.50", "2.50"))
    assert fragmented is not None and shared is not None
    assert fragmented.first_change == "set PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"
    assert "`rocm-smi` lists them" in shared.first_change


def test_the_answer_gives_the_least_that_the_training_needs() -> None:
    message = read_message(NEW)
    assert message is not None
    assert message.answer()[:2] == (
        "The GPU of 23.7 GiB has no room for 2.00 GiB more. First change: activation "
        "checkpointing, or half the micro batch size if it is on already.",
        "The tensors took 21.5 GiB, and the next one needed 2.00 GiB. The training needs at least "
        "the sum.",
    )


def test_free_memory_counts_if_no_block_is_large_enough() -> None:
    text = NEW.replace("512.00 MiB", "1.06 GiB")
    limited = read_message(text.replace("in use.", "in use. 22.60 GiB allowed;"))
    assert limited is not None and limited.cause == "too large"
    message = read_message(text)
    assert message is not None and message.cause == "fragmentation"
    assert message.answer() == (
        "The GPU's memory is fragmented: torch holds 1.06 GiB in free blocks, and 1.06 GiB is "
        "free, but no block has room for 2.00 GiB more. First change: set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        "The tensors took 21.5 GiB, and the next one needed 2.00 GiB. The training needs at least "
        "the sum.",
        "If this is not enough: activation checkpointing, or half the micro batch size if it is "
        "on already.",
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "demo-3m-cpu",
        "RuntimeError: shapes do not match",
        "the old job was killed by me",
        "killed-run",
    ],
)
def test_other_texts_are_no_message(text: str) -> None:
    assert read_message(text) is None


def test_a_large_tensor_is_often_the_logits_which_checkpointing_does_not_shrink() -> None:
    """8 x 8,192 tokens of Llama 3 have logits of 31.31 GiB in 32 bits."""
    assert round(65_536 * 128_256 * 4 / 2**30, 2) == 31.31
    large = read_message(
        "CUDA out of memory. Tried to allocate 31.31 GiB. GPU 1 has a total capacity of 79.25 GiB "
        "of which 20.06 GiB is free. Of the allocated memory 55.49 GiB is allocated by PyTorch, "
        "and 2.52 GiB is reserved by PyTorch but unallocated."
    )
    assert large is not None and large.cause == "too large"
    first, *rest = large.answer()
    assert "First change: half the micro batch size" in first
    assert any("often the logits" in sentence for sentence in rest)
    small = read_message(NEW)
    assert small is not None and not any("logits" in one for one in small.answer())


ENGINE_STARTS = (
    "ValueError: Free memory on device cuda:0 (21.5/79.1 GiB) on startup is less than\ndesired GPU "
    "memory utilization (0.9, 71.19 GiB). Decrease GPU memory utilization or reduce GPU memory "
    "used by other processes."
)
NO_CACHE = "ValueError: No available memory for the cache blocks. Try increasing ..."
SMALL_CACHE = (
    "ValueError: To serve at least one request with the model's max seq len (40960), (5.62 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (3.1 GiB). Try ..."
)
OLD_CACHE = (
    "The model's max seq len (4096) is larger than the maximum number of tokens that can be "
    "stored in KV cache (3664)."
)


@pytest.mark.parametrize(
    ("text", "sizes", "answer"),
    [
        (
            ENGINE_STARTS,
            (79.1, 71.19, 21.5),
            "vLLM asks for 71.2 GiB of the GPU of 79.1 GiB when it starts, and 21.5 GiB is free. "
            "First change: a smaller vllm_gpu_memory_utilization, at most 0.27 here.",
        ),
        (NO_CACHE, (None, None, None), "vLLM's share of the GPU leaves too little for its cache. "),
        (
            SMALL_CACHE,
            (None, 5.62, 3.1),
            "vLLM's share of the GPU leaves only 3.10 GiB for its cache; the longest sequence "
            "needs 5.62 GiB. First change: a larger vllm_gpu_memory_utilization, ",
        ),
        (
            OLD_CACHE,
            (None, None, None),
            "vLLM's share of the GPU leaves too little for its cache. ",
        ),
    ],
)
def test_an_engine_without_room_gets_another_share(
    text: str, sizes: tuple[float | None, ...], answer: str
) -> None:
    assert read_message(text) is None
    message = read_engine_message(f"a line before\n{text}\nand one after")
    assert message is not None
    assert (message.capacity_gib, message.requested_gib, message.free_gib) == sizes
    assert message.cause == ("engine start" if text == ENGINE_STARTS else "engine cache")
    first, commands = message.answer()
    assert first.startswith(answer) and "autotune plan --objective grpo" in commands
