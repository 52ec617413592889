"""Several ranks: their processes, on this machine and others."""
