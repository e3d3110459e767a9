"""Run records, live view and summaries."""
