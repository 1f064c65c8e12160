"""Random-weight models of the real classes: small ones for tests, full-size ones for benchmarks."""
