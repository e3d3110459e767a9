"""Jobs on a cluster through Ray's job API: what is sent, how it is watched, how it is ended."""
