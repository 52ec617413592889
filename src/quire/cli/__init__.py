"""The `quire` command. Heavy modules are imported inside the commands that need them."""
