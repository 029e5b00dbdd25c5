"""From a request for text to the bytes of its response, whichever API it came by."""
