"""Write a checkpoint again: plan, write, verify, publish."""
