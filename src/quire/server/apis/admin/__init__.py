"""Routes for who runs the server."""
