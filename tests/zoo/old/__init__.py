"""Files of old releases of torch, written and read by those releases themselves."""
