"""The measuring harness behind `pequod bench`.

`session` starts a Pequod or connects to any OpenAI-compatible URL; `client` sends one request and keeps each token's
time; `load` makes prompts and arrivals; `figures` turns what came back into percentiles and medians; `show` and `plots`
print them. Each command is a module with `add_arguments` and `run`. What needs torch runs as `python -m engine.…`.
"""
