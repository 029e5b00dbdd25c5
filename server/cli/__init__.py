"""The command line: commands, the start-up banner and the measuring harness of `pequod bench`."""
