"""Make quantised weights dense: plain weights with the same values."""
