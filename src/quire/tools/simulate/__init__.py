"""Simulates a fleet: a trace of requests, the router's own code, and models of engines."""
