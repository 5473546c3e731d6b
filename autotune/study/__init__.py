"""The search itself: proposals, multi-fidelity evaluation, selection, confirmation, and what a study remembers."""
