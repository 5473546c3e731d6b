"""The search: proposals, multi-fidelity evaluation, selection, confirmation, storage."""
