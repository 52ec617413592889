"""The names that each family of checkpoints uses; one module per family."""
