"""Zips and tars: their members as ranges of bytes."""
