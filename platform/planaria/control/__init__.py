"""The controller: a state machine over membership, with small pure policies."""
