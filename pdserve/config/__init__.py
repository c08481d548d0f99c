"""Configuration: one YAML for a whole deployment, of which each process uses its sections."""

from pdserve.config.load import config_schema, load_config
from pdserve.config.schema import Config, SpeculationSection

__all__ = ["Config", "SpeculationSection", "config_schema", "load_config"]
