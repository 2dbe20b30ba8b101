"""Real libraries: each saves tiny models in its own ways, and what ckptool makes of the files is compared with them."""
