"""The answers of commands as frozen values: planning makes them, renderers read them."""
