"""A fleet in simulated time: the router's own code before modelled engines, driven by a trace."""
