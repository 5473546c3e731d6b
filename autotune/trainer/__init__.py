"""The training itself: this folder is exported beside train.py exactly as it is, and the probe runs the same files.

Nothing in it imports autotune, and its modules import each other relatively, so that it works under both names.
"""
