"""A router in front of several servers of one model: `quire route`."""
