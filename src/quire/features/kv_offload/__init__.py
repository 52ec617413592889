"""KV blocks that the device has no room for: kept in the host's memory and in files, and brought
back where that is cheaper than computing them again."""
