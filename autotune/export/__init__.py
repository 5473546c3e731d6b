"""Writes a study's winner in other tools' formats. Each exporter is a pure function of a Recipe."""
