"""Writes the winner in other tools' formats. An exporter is a pure function of a Recipe."""
