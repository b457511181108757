"""What a machine can run, and what other machines could: trials, versions, the support matrix, a config's needs."""
