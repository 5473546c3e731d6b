"""Calibrating an NVIDIA GPU: rates that a card can have, a host that has a pace, and a training as
fast as expected.
"""

import pytest

from autotune.api import calibrate
from autotune.core.nvml import list_gpus

pytestmark = pytest.mark.skipif(not list_gpus(), reason="needs an NVIDIA GPU")


def test_a_gpu_is_calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = calibrate()
    assert made.measures_gpu and made.fingerprint.driver
    for rates in made.rates.products.values():
        assert rates[1024] < 1.2 * max(rates.values())
    assert made.products_tflops() > 2 * made.rates.products["fp32"][1024] > 0
    assert made.rates.copy_gb_s > (made.rates.link_gb_s or 0) > 1
    assert 0.5 < made.layer_ms < 100 and 0.5 < made.rates.launch_us < 100
    assert made.reference is None or 0.3 < made.reference < 3
