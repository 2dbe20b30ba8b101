"""Recipes: how the tensors of one layout become those of another, without computing anything."""
