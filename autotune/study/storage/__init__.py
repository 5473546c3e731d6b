"""Store a study and share it between workers: database, probe table, leases and outbox."""
