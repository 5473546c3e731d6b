"""The answers of commands, as frozen dataclasses that `planning` makes and renderers read."""
