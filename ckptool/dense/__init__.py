"""Quantised weights as the plain ones that they stand for."""
