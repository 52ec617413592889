"""What each family of checkpoints calls things; one module per family."""
