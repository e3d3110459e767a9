"""Whether a layout changes the mathematics: every gradient and parameter against one process in float64."""
