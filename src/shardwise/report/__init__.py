"""Results of runs and benches, on the terminal, as JSON and as HTML pages."""
