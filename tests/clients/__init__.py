"""Clients that people use, each against a live server: `make clients` runs all of them and prints the table."""
