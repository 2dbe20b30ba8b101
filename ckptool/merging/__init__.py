"""Weights of several files put together: adapters into the model that they are for, and averages."""
