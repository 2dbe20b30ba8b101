"""Small nets that really train, and the checkpoints they leave behind, in every way that people save them."""
