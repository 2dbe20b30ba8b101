"""Computations with torch, or with numpy alone, as in ``statistics``. Both are imported when a function needs them."""
