"""What a response must look like: checks of the schemas, regular expressions and grammars that requests bring."""
