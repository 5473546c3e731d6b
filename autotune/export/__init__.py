"""Writes the winner in formats that others run. An exporter is one pure function: a Recipe in, file texts out."""
