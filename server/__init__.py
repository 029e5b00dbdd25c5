"""HTTP, text and users: turns requests into token ids and token ids back into text."""
