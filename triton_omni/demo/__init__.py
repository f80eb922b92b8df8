"""A real Qwen3-Omni checkpoint at small sizes: for machines without the weights, and for tests."""
