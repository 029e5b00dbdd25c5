"""The architectures of the native decoder, and what their config.json files say."""
