"""What a study tunes: specification, search space, dataset, workload, target and constraints."""
