"""The pipeline benchmark: stages that sleep."""
