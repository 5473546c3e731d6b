# -*- coding: utf-8 -*-
"""Trains a model. Probes (short measured runs) and exported scripts run these files.

The export copies these files unchanged beside train.py, into a package called `runtime`. They
import no other autotune package, and import each other by relative names, so that the copy works.
"""
