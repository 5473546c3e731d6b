"""The probe: a short real fine-tuning run in a warm worker. `launcher` is the parent's side, the rest the child's."""
