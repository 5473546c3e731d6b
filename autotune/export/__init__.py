"""Writes the winner in other tools' formats. An exporter is a pure function: Recipe to texts."""
