"""Sources of bytes that are read at an offset: files, memory, slices of either."""
