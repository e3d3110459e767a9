"""The contenders of the benchmark of single steps, each in rank processes of its own."""
