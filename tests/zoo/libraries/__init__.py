"""One module for each group of libraries that fit into one environment; one function for each library."""
