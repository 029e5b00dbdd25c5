"""Text to token ids and back: tokenizer, chat templates, and the threads and processes that run them."""
