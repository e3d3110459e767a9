"""What is minimised and what is scored."""
