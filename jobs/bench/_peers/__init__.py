"""The contenders of the benchmarks: Planaria and its peers on the same work."""
