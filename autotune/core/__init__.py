"""Values and vocabulary that every other package uses: errors, units, files, knobs, configurations, probe values."""
