"""The commands of the CLI: one file per command, or a few small ones together, imported on use."""
