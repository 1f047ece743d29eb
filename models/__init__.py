"""All that touches transformers, vLLM and the hub."""
