"""What torch computes, and in ``statistics`` numpy alone. Both are imported when a function needs them."""
