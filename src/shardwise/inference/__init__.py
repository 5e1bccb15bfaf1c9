"""A trained or published model answers: on the terminal and over HTTP."""
