"""What a Prometheus server can read of a job: a catalogue, a tally of records, a collector and a small server."""
