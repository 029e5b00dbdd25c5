"""Pequod in a Python program:

from pequod import LLM

with LLM("builtin") as llm:
    print(llm.chat("What is 7 + 5?"))
    for output in llm.generate(["The sea", "A ship"], max_tokens=16):
        print(output)
"""

from engine import ConfigError, ModelError
from server.offline import LLM, APIError, Output
from server.settings_values import SettingsError

__all__ = ["LLM", "APIError", "ConfigError", "ModelError", "Output", "SettingsError"]

if __name__ == "__main__":  # `python -m pequod serve`, for an environment whose commands are not on the PATH
    from server.__main__ import main

    raise SystemExit(main())
