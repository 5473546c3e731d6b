"""Values and vocabulary that every other package uses.

They include errors, units, files, knobs, configurations, and the requests and results of probes.
"""
