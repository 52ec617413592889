"""The engine: the loop that drives scheduler and runner, in this process or in one of its own."""
