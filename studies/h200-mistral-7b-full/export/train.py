# -*- coding: utf-8 -*-
"""Fine-tune with exactly the configuration that was measured. For its options: python train.py --help

The configuration is in train_config.json, the training in runtime/train.py.
"""

from pathlib import Path

from runtime.command_line import start

if __name__ == "__main__":
    start(Path(__file__).parent)
