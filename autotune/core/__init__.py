"""Values and vocabulary that every other package uses.

Among them are errors, units, files, knobs, configurations, and the requests and results of probes.
"""
