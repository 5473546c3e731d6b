"""What the host has, also within the limits of a container, and a disk on which nothing is left."""

import os
from pathlib import Path

import pytest

from autotune.core import machine
from autotune.core.machine import disk_mb_s, host_memory_gib, num_cores, processor_name


@pytest.mark.parametrize(
    ("quota", "cores"), [("50000 100000", 0.5), ("max 100000", None), ("900000000 100000", None), ("", None)]
)
def test_a_container_may_have_a_share_of_the_processors(tmp_path: Path, quota: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert num_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_a_container_may_have_a_part_of_the_memory(tmp_path: Path) -> None:
    whole = host_memory_gib(tmp_path)
    assert whole > 0.2
    for limit, expected in (("max", whole), (str(2**27), 0.125), (str(2**60), whole)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert host_memory_gib(tmp_path) == expected


def test_the_processor_has_a_name() -> None:
    assert processor_name() and processor_name().isprintable()


def test_writing_to_the_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WRITTEN_BYTES", 2 * machine.CHUNK_BYTES)
    speed = disk_mb_s(tmp_path)
    assert speed is not None and speed > 0
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_written_the_disk_is_unknown(tmp_path: Path) -> None:
    assert disk_mb_s(tmp_path / "none") is None
