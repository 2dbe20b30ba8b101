"""Other systems, as far as this one can be them: Windows under Wine, a simulated macOS, other Pythons."""
