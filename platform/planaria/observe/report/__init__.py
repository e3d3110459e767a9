"""The report of a run: what its folder holds, read, reduced, drawn and laid out as one HTML page."""
