"""Qwen3-Omni on NVIDIA Triton Inference Server: the runtime behind the four models of ``model_repository``."""
