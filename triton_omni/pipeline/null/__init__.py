"""Engines without a model: right shapes, right pace, right ends. They measure and stress everything around a model.

They keep the engines' protocols to the letter (``pipeline/stages.py``) and load neither torch nor a checkpoint. Time
passes on one timer thread per engine, so that 64 streams cost little more than their events.
"""

from triton_omni.pipeline.null.code2wav import NullCode2Wav, NullCode2WavConfig
from triton_omni.pipeline.null.talker import NullTalker, NullTalkerConfig
from triton_omni.pipeline.null.thinker import NullThinker, NullThinkerConfig

__all__ = [
    "NullCode2Wav",
    "NullCode2WavConfig",
    "NullTalker",
    "NullTalkerConfig",
    "NullThinker",
    "NullThinkerConfig",
]
