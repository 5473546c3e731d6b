"""What is tuned for what: the study's specification, search space, dataset, workload, target and constraints."""
