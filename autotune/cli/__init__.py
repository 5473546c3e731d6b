"""The command line: options, commands, and everything printed to a terminal."""
