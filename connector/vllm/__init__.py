"""The vLLM plugin: a KV connector that publishes and reuses attention maps. Imported by vLLM alone."""
