"""The answers of commands, as frozen values that `planning` makes and renderers read."""
