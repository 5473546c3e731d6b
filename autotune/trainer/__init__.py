"""The training. The probe runs these files, and the export copies them beside train.py unchanged.

They import no other package of ours. Imports within the folder are relative, so that they work
under both names.
"""
