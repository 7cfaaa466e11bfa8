"""The `mapflow` command."""
