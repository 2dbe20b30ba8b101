"""Files far away, read by ranges: the one place that talks to a network, imported only when an address is given."""
