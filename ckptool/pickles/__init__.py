"""Pickle bytes to inert nodes and back. Nothing is looked up or called."""
