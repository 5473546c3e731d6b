import pytest

from autotune.core.oom_text import requested_gib


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", 2.5),
        ("Tried to allocate 512.00 MiB", 0.5),
        ("Tried to allocate 256.00 KiB", 256 / 2**20),
        ("you tried to allocate 1073741824 bytes. Error code 12", 1.0),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_size_that_failed_is_read_in_its_unit(message: str, gib: float | None) -> None:
    assert requested_gib(message) == gib
