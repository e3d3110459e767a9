"""One optimizer step on one layout."""
