"""The commands of the CLI. A file has one command or a few small ones; it is imported on use."""
