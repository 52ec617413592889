"""KV events: which prefixes an engine's cache holds, and what it has to do, for routers."""
