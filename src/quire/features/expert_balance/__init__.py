"""Copies of experts on several ranks, placed by how often tokens choose each."""
