"""Where candidates come from: n-grams, the suffix index, context statistics, heads."""
