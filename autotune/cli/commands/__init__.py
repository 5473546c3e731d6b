"""The commands of the CLI. A file has one or a few commands, and is imported when one runs."""
