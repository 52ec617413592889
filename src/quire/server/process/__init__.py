"""Server processes: sockets, uvicorn, workers and their supervisor."""
