"""The recipes that come with it: each a file of TOML."""
