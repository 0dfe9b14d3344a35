"""Datasets that are computed: electron diffraction of crystals, and a protein that folds and unfolds."""
