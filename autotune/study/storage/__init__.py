"""How a study is stored and shared: database, probe table, leases, outbox."""
