"""What runs inside an inference engine: the client of the daemon, plans, and the vLLM plugin."""
