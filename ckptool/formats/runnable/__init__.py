"""Find the pickles and programs in a file that could run, read them as data, and grade what they would do."""
