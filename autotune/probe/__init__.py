"""The probe: a short real fine-tuning run in a warm worker, and the parent's side of it."""
