# -*- coding: utf-8 -*-
"""Trains a model. Probes run these files, and the export copies them unchanged beside train.py.

These files import no other autotune package. Their imports of each other are relative, so that
they also work in the exported copy, which is called `runtime`.
"""
