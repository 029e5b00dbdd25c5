"""Pequod in a Python program: `from pequod import LLM`."""

from engine import ConfigError, ModelError
from server.offline import LLM, APIError, Output
from server.settings_values import SettingsError

__all__ = ["LLM", "APIError", "ConfigError", "ModelError", "Output", "SettingsError"]
