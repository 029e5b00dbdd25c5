"""POST /tokenize, /detokenize and /apply-template."""
