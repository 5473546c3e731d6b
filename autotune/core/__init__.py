"""Values and vocabulary that every other package uses.

They are errors, units, files, knobs, configurations and probe values.
"""
