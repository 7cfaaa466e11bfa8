"""`mapflow demo`: a daemon and two vLLM servers on this machine, playing conversations that alternate between them."""
