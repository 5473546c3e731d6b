"""The commands of the CLI, a file each or a few small ones together; loaded when used."""
