"""Tokenizers of model folders: every folder gets a tokenizer.json, which the server and grammars both read.

`tokenizer_folder` in folder.py returns the folder that has the file. From other files it is made once, by convert.py in
a process of its own. Text is neither encoded nor decoded here.
"""
