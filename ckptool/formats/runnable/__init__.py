"""What in a file could run: pickles and programs, in whatever holds them. They are read as data, and graded."""
