"""Other projects' test suites and load clients, run unchanged against a live server: `make conformance`."""
