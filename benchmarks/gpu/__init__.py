"""What a GPU makes of Pequod: one command, one table."""
