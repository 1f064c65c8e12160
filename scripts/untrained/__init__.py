"""Models of the real classes with random weights: small ones to test, full-size ones to measure."""
