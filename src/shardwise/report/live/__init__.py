"""What a machine and a run do now: values with units in their names, and views of them for a terminal."""
