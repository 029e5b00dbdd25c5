"""Models in GGUF files, which hold weights, hyperparameters and tokenizer together.

`folder_of` writes the model folder that the rest of Pequod reads: config.json, tokenizer.json and so on. The weights
stay in the file, where `GgufCheckpoint` reads them.
"""
