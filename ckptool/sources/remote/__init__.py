"""Remote files, read by ranges: the only package that uses the network, imported only when an address is given."""
