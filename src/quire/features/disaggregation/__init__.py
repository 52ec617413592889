"""Prefill and decode in different engines: prompts are computed by one, their KV goes to another.

The reader (role decode) asks over HTTP for a prompt, and gets a grant. It then fetches the blocks
over a connection of the grant's own, into its prefix tree, where the request finds them.
"""
