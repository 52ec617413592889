"""Low-rank adapters beside linear layers."""
