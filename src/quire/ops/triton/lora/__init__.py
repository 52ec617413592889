"""Low-rank adapters on linear layers."""
