"""The page that `report` writes: one file of HTML with all that it shows, which needs no network and no library."""
