"""A load client for servers that answer in text and speech: ours over HTTP or gRPC, and vLLM-Omni's. Loads no torch."""
