"""The environment of a worker: what it needs of its parent's, and no more."""

from autotune.probe.worker_process import child_environment


def test_the_environment_by_device() -> None:
    kept = child_environment({"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "LD_PRELOAD": "x"}, "cuda")
    assert kept["CUDA_VISIBLE_DEVICES"] == "1" and "LD_PRELOAD" not in kept
    # Of several cards the first alone, in the order in which they are listed and watched.
    assert child_environment({}, "cuda")["CUDA_VISIBLE_DEVICES"] == "0"
    assert child_environment({"CUDA_VISIBLE_DEVICES": "GPU-1f, GPU-2e"}, "cuda")["CUDA_VISIBLE_DEVICES"] == "GPU-1f"
    assert child_environment({"CUDA_VISIBLE_DEVICES": ""}, "cuda")["CUDA_VISIBLE_DEVICES"] == ""
    assert kept["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "MALLOC_ARENA_MAX" not in kept
    assert "MALLOC_ARENA_MAX" in child_environment({}, "cpu")
