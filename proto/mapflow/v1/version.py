"""The one place that holds the version of MapFlow."""

__version__ = "0.1.0"
