"""Gated delta nets."""
